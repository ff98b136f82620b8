"""A call that runs: what the connections that wait for it share with the task that makes it.

Leaves: the reply, as a future. A call belongs to its session: connections come and go, several may wait for one call,
and none of them ends it.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from gyre_core.proxy.conversation import Reply
from gyre_core.proxy.refusal import Refusal, RefusalKind


@dataclass(slots=True, kw_only=True, eq=False)
class RunningCall:
    """One call of a session, from its request until its reply was delivered.

    Example: reply = await call.wait(15.0); reply is None when a response was opened meanwhile
    """

    call_id: str
    created_s: float  # since the epoch
    reply: asyncio.Future[Reply] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    task: asyncio.Task[None] | None = None  # that settles `reply`; None when it is settled from the start
    prompt_tokens: int = 0  # 0 until the prompt is built
    opened: bool = False  # a response has begun: from now on the call may not fail

    def is_open(self) -> bool:
        """Whether some harness was promised a reply."""
        return self.opened

    def settle(self, outcome: Reply | Refusal) -> None:
        """End the call with a reply or a refusal; one that has ended stays as it is.

        An exception holds the frames that raised it, and those the request and this call. So the refusal is kept
        without them: such cycles of few objects and many megabytes are left alone by the collector for long.
        """
        if self.reply.done():
            return
        if isinstance(outcome, Refusal):
            self.reply.set_exception(outcome.again())
            self.reply.exception()  # seen, even when nobody waits any more
        else:
            self.reply.set_result(outcome)

    def result(self) -> Reply:
        """The reply of a call that is done; raises Refusal."""
        if self.reply.cancelled():
            raise Refusal(RefusalKind.FORBIDDEN, "this session is sealed")
        error = self.reply.exception()
        if isinstance(error, Refusal):
            raise error.again()
        return self.reply.result()

    async def wait(self, keepalive_s: float) -> Reply | None:
        """The reply if it comes in `keepalive_s`, else None: then the caller must open a response. Raises Refusal.

        A response is never opened before the prompt is built, because a request can be refused until then.
        """
        while True:
            await asyncio.wait((self.reply,), timeout=keepalive_s)
            if self.reply.done():
                return self.result()
            if self.prompt_tokens:
                self.opened = True
                return None

    def when_done(self, act: Callable[[], None]) -> None:
        """Call `act` when the call has ended, however it did."""
        self.reply.add_done_callback(lambda _: act())
