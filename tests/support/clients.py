"""Official SDK clients of a proxy that serves a real port."""

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import openai

from tests.support.proxies import Harness, ProxyUnderTest, fake_engine, running_proxy, serving


@dataclass
class Stage:
    """A served proxy with one session, and SDK clients that are closed at the end."""

    proxy: ProxyUnderTest
    harness: Harness
    url: str
    stack: AsyncExitStack

    async def anthropic(self, path: str = "", **fields: Any) -> anthropic.AsyncAnthropic:
        key = fields.pop("api_key", self.harness.api_key)
        return await self.stack.enter_async_context(
            anthropic.AsyncAnthropic(base_url=self.url + path, api_key=key, **fields)
        )

    async def openai(self, path: str = "/v1", **fields: Any) -> openai.AsyncOpenAI:
        key = fields.pop("api_key", self.harness.api_key)
        return await self.stack.enter_async_context(openai.AsyncOpenAI(base_url=self.url + path, api_key=key, **fields))

    def __iter__(self) -> Iterator[Any]:
        return iter((self.proxy, self.harness))


@asynccontextmanager
async def served_stage(model_path: Path, **settings: Any) -> AsyncIterator[Stage]:
    """A stage whose engine has no outputs yet; `settings` are the proxy's."""
    async with (
        running_proxy(model_path, fake_engine(), **settings) as proxy,
        serving(proxy) as url,
        AsyncExitStack() as stack,
    ):
        yield Stage(proxy, await proxy.open(), url, stack)
