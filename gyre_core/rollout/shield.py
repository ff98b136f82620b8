"""Work that a cancellation does not cut short: removing a folder, ending a container, closing a session.

Enters: work. Leaves: its result never; a cancellation that came meanwhile is raised after the work's end.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any


async def finish_even_if_cancelled(work: Awaitable[Any]) -> None:
    """Await `work` to its end; a cancellation in between is raised after it."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


async def unhurried(function: Callable[..., Any], *arguments: Any) -> None:
    """Run a blocking function in a thread, to its end even when cancelled meanwhile."""
    await finish_even_if_cancelled(asyncio.to_thread(function, *arguments))
