"""Running a coroutine from a task's thread, whether or not that thread already has an event loop."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def run_async(work: Callable[[], Awaitable[T]]) -> T:
    """Run `work()` to its end on an event loop of its own and return its result."""

    async def main() -> T:
        return await work()

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(main())
    with ThreadPoolExecutor(max_workers=1) as pool:  # Prefect may run a task on a thread that has a loop
        return pool.submit(lambda: asyncio.run(main())).result()
