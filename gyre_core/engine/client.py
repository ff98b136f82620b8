"""What an inference engine can be asked: token ids in, token ids and sampler log-probs out.

`EngineClient` is all that the proxy needs of an engine. Two implementations exist: `gyre_core.engine.sglang_client`
(the real server) and the deterministic one of `gyre_core.engine.fake` behind the same HTTP contract.
"""

from collections.abc import Sequence
from typing import Protocol

from gyre_core.types import Generation, SamplingParams, TokenIds


class EngineClient(Protocol):
    """One engine. Calls may overlap; each has its own `rid`."""

    async def generate(
        self, input_ids: Sequence[int] | TokenIds, params: SamplingParams, *, rid: str, cache_salt: str = ""
    ) -> Generation:
        """Sample a continuation of `input_ids`.

        `rid` is unique among the engine's running calls and names this one for `abort`. `cache_salt` separates prefix
        caches: pass str(policy_version), so that cached keys and values never meet other weights. An aborted call is a
        result (FinishReason.ABORT with the ids so far), not an error.

        Raises ValueError for input that the engine must not see (no ids, an id outside the vocabulary) and EngineError
        for everything the engine did wrong; `EngineError.retryable` says whether to try again elsewhere. Cancelling
        the awaiting task aborts the call on the engine.
        """
        ...

    async def abort(self, rid: str) -> None:
        """Ask the engine to end call `rid` now; its `generate` returns what was sampled. Unknown rids are no error."""
        ...

    async def aclose(self) -> None:
        """Close the connections. The engine itself goes on."""
        ...
