"""The control API of a cell host, from the flow's side. Blocking: one thing at a time with a cell."""

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import httpx

from gyre_core.errors import EngineError, GyreError, TrainError, TransferError
from gyre_core.scheduler.cell import StaleEpochError
from gyre_core.transfer.branches import branches_to_ipc
from gyre_core.types import TrainingBranch

_ERRORS: dict[str, type[GyreError]] = {
    "TrainError": TrainError,
    "TransferError": TransferError,
    "EngineError": EngineError,
    "StaleEpochError": StaleEpochError,
}


class CellClient:
    """Talks to one cell host. Every method raises the GyreError that the host reports, or GyreError when it is gone.

    Example: with CellClient("http://127.0.0.1:8101", secret) as cell: cell.role("train", epoch=1)
    """

    def __init__(self, url: str, secret: str, *, timeout_s: float = 3600.0) -> None:
        self.url = url
        self._http = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {secret}"},
            timeout=httpx.Timeout(timeout_s, connect=5.0),
            # Well below the host's own limit: a request on a connection that the host closes at this very moment
            # fails without an answer, and these requests may not be repeated blindly.
            limits=httpx.Limits(keepalive_expiry=2.0),
            trust_env=False,
        )

    def status(self) -> dict[str, Any]:
        """State, epoch, policy version, the engine's URL and its key (`engine_key`: not to be logged or stored)."""
        return self._call("GET", "/status")

    def role(self, to: str, *, epoch: int, policy_version: int | None = None) -> dict[str, Any]:
        """Move the cell to `drain`, `train` or `rollout`; `epoch` must be the current one, else StaleEpochError.

        With `policy_version` the engine serves that version when the cell is back in rollout. Returns the new status
        and `phases`: seconds by name. Safe to repeat after a lost answer.
        """
        body = {"to": to, "epoch": epoch}
        if policy_version is not None:
            body["policy_version"] = policy_version
        return self._call("POST", "/role", json=body)

    def weights_refresh(self, *, policy_version: int) -> dict[str, Any]:
        """Bring this version into the cell's own engine, verified by checksum; the caller has drained its calls.

        Returns the report of the publication and `phases`; `refreshed` is False when the engine served it already.
        """
        return self._call("POST", "/weights/refresh", json={"policy_version": policy_version})

    def train_open(self, *, step: int, policy_version: int, learning_rate: float | None = None) -> dict[str, Any]:
        """Open a step of the weights of `policy_version`; safe to repeat. Returns the step's status.

        After a restart of the core the step holds what its journal knows, so send every group again: known ones count
        once. Without a learning rate the step takes the configuration's. Not in the middle of another step.
        """
        body = {"step": step, "policy_version": policy_version, "learning_rate": learning_rate}
        return self._call("POST", "/train/open", json=body)

    def train_group(self, group_id: str, branches: Sequence[TrainingBranch]) -> dict[str, Any]:
        """A graded group of the open step; safe to repeat. Returns its `micro_steps`: none when it has no signal."""
        return self._call("POST", "/train/group", params={"group_id": group_id}, content=branches_to_ipc(branches))

    def train_seal(self, *, num_rollouts: int) -> dict[str, Any]:
        """No more groups come, and the step divides by `num_rollouts`; safe to repeat. Returns the step's status."""
        return self._call("POST", "/train/seal", json={"num_rollouts": num_rollouts})

    def train_finish(self, *, wait_s: float = 10.0) -> dict[str, Any] | None:
        """Statistics and `account` of the step once it is done, else None after `wait_s`; safe to repeat.

        Raises TrainError for a step that was refused: then weights and version are as before, and the step is open to
        be opened anew.
        """
        reply = self._call("POST", "/train/finish", json={"wait_s": wait_s})
        return None if reply.get("running") else reply

    def train_abort(self) -> dict[str, Any]:
        """Give the open step up: weights and version stay, the groups are the caller's. Safe to repeat."""
        return self._call("POST", "/train/abort", json={})

    def cut_off(self, trainer: str) -> dict[str, Any]:
        """To the core: this member's process is dead. What it did not hand in is computed again at once."""
        return self._call("POST", "/train/cut_off", json={"trainer": trainer})

    def sum_begin(self) -> None:
        """Replay: put the gradient so far aside; micro-steps sum from zero until `sum_end`."""
        self._call("POST", "/train/sum/begin", json={})

    def sum_end(self) -> None:
        """Replay: add the sum since `sum_begin` to what was put aside, as a core adds a satellite's."""
        self._call("POST", "/train/sum/end", json={})

    def micro_step(self, branches: Sequence[TrainingBranch]) -> dict[str, Any]:
        """Forward and backward of some branches; gradients accumulate. Returns keys by micro-step and their stats."""
        return self._call("POST", "/train/micro_step", content=branches_to_ipc(branches))

    def optimizer_step(
        self, *, num_rollouts: int, policy_version: int, learning_rate: float | None = None
    ) -> dict[str, Any]:
        """Scale gradients by 1/num_rollouts, clip, step; the weights become `policy_version`. Returns stats.

        Without a learning rate the step takes the configuration's.
        """
        body = {"num_rollouts": num_rollouts, "policy_version": policy_version, "learning_rate": learning_rate}
        return self._call("POST", "/train/optimizer_step", json=body)

    def train_step(
        self,
        branches: Sequence[TrainingBranch],
        *,
        num_rollouts: int,
        policy_version: int,
        learning_rate: float | None = None,
    ) -> dict[str, Any]:
        """A whole step, shared with whichever satellites join (the cell's settings need `members`).

        The reply has the stats of the step and its account.
        """
        query: dict[str, float] = {"num_rollouts": num_rollouts, "policy_version": policy_version}
        if learning_rate is not None:
            query["learning_rate"] = learning_rate
        return self._call("POST", "/train/step", params=query, content=branches_to_ipc(branches))

    def skip_step(self, *, policy_version: int) -> dict[str, Any]:
        """A step without any gradient: only the version advances."""
        return self._call("POST", "/train/skip_step", json={"policy_version": policy_version})

    def reset_gradients(self) -> None:
        """Forget accumulated gradients (a step that was refused)."""
        self._call("POST", "/train/reset", json={})

    def publish(self) -> dict[str, Any]:
        """Bring the trainer's weights into the engine, verified by checksum. Returns the report."""
        return self._call("POST", "/publish", json={})

    def save_checkpoint(self, path: str, extra: dict[str, Any]) -> dict[str, Any]:
        """Begin to write weights, optimizer and rng below `path`, with `extra` in the manifest.

        The reply names the weights' digest. The checkpoint counts once `finish_checkpoint` has returned.
        """
        return self._call("POST", "/checkpoint/save", json={"path": path, "extra": extra})

    def finish_checkpoint(self) -> dict[str, Any]:
        """Wait until the checkpoint that was begun is on the disk; raises TrainError when it could not be written."""
        return self._call("POST", "/checkpoint/finish", json={})

    def export_hf(self, path: str) -> dict[str, Any]:
        """Write the weights as a Hugging Face folder."""
        return self._call("POST", "/checkpoint/export", json={"path": path})

    def weights(self) -> dict[str, Any]:
        """`weights_digest` of the trainer and its `back_end`: versions, device, threads."""
        return self._call("POST", "/train/weights", json={})

    def compare_checkpoint(self, path: str) -> dict[str, Any]:
        """The trainer's state against a checkpoint's (train.stats.StateDifference); it holds the latter afterwards."""
        return self._call("POST", "/checkpoint/compare", json={"path": path})

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> "CellClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        try:
            reply = self._http.request(method, path, **arguments)
        except httpx.HTTPError as error:
            raise GyreError(f"the cell host at {self.url} does not answer {path}: {error!r}") from error
        if reply.status_code >= 400:
            try:
                body = reply.json()
            except ValueError:
                body = {}
            kind = _ERRORS.get(body.get("kind", ""), GyreError)
            raise kind(f"cell host, {path}: {body.get('error', reply.text[:500])}")
        return reply.json()
