"""The core's side of a step with satellites: serves the queue and the weights, runs steps with whoever joins.

Enters: a replica, steps with their groups. Leaves: the summed gradient in the replica, divided once and stepped by it;
the account of each step; snapshots for the satellites. Without satellites it is a core that works alone: the same code,
the same result to fp32 rounding.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from gyre_core.cells.satellite import Channel, open_buffer, open_reader
from gyre_core.errors import GyreError
from gyre_core.process import listen
from gyre_core.train.members import CoreMember, Replica
from gyre_core.train.queue_rates import Rates
from gyre_core.train.queue_records import QueueRules, StepAccount, StepIdentity
from gyre_core.train.queue_service import MemberBoard, create_member_app
from gyre_core.train.queue_step import StepQueue
from gyre_core.transfer.gradients import BufferReader, flat_bytes, flatten

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSettings:
    """Where satellites find the core. Example: HubSettings(secret=new_secret(), work_dir=Path("work"))"""

    secret: str
    work_dir: Path  # journals of running steps
    host: str = "127.0.0.1"
    port: int = 0  # 0: any free one
    channel: Channel = "local"
    owner: str = "core"


class MemberHub:
    """A running service, as a context. `publish_weights` first, then a step at a time.

    Example: with MemberHub(replica, settings) as hub: hub.publish_weights(0); queue = hub.open_step(0, rules); ...
    """

    def __init__(self, replica: Replica, settings: HubSettings, *, reader: BufferReader | None = None) -> None:
        """`reader` reads the satellites' gradients; by default over the settings' channel."""
        self._replica = replica
        self._settings = settings
        self.board = MemberBoard()
        self._rates = Rates()
        self._snapshot = open_buffer(settings.channel, flat_bytes(replica.weight_shapes()), settings.host)
        self._reader = reader or open_reader(settings.channel, settings.host)
        self.core = CoreMember(replica, self._reader)
        self._listener = listen(settings.host, settings.port)
        self.url = f"http://{settings.host}:{self._listener.getsockname()[1]}"
        app = create_member_app(self.board, settings.secret)
        self._server = uvicorn.Server(
            uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1)
        )
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._listener]}, name="members", daemon=True
        )

    def start(self) -> None:
        """Take requests; returns when the service answers."""
        self._thread.start()
        deadline = time.monotonic() + 30.0
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise GyreError(f"the members' queue does not start on {self.url}")
            time.sleep(0.01)

    def publish_weights(self, policy_version: int) -> str:
        """Offer the replica's weights as this version; returns their checksum."""
        flatten(self._replica.weights(), self._snapshot.memory)
        offer = self._snapshot.offer(f"v{policy_version}")
        self.board.publish_weights(policy_version, offer)
        return offer.checksum

    def open_step(self, step: int, rules: QueueRules) -> StepQueue:
        """The queue of a step from the published weights: members join it from now on, groups can be added.

        After a restart of the core it holds what the journal of this very step knows (`has_group`).
        """
        found = self.board.weights
        assert found is not None, "publish_weights comes first"
        policy_version, offer = found
        queue = StepQueue(
            StepIdentity(step=step, policy_version=policy_version, weights=offer.checksum),
            rules,
            owner=self._settings.owner,
            rates=self._rates,
            journal_folder=self._settings.work_dir / "open-step",
        )
        self.board.open_step(queue)
        return queue

    def run_step(
        self, queue: StepQueue, step: Callable[[StepAccount], Mapping[str, Any]]
    ) -> tuple[StepAccount, dict[str, Any]]:
        """Work until the queue is closed, call `step` (which divides once and steps), publish the next version.

        Another thread may add groups meanwhile and seal the queue. Raises TrainError when the step is refused: the
        gradients are dropped, weights and version are as before, the groups are the caller's still.
        """
        account = self.core.run(queue)
        assert account is not None, "nobody pauses it here"
        try:
            result = dict(step(account))
        except BaseException as error:
            queue.abort(f"{type(error).__name__}: {error}")
            raise
        queue.finish()
        self.publish_weights(queue.identity.policy_version + 1)
        return account, result

    def close(self) -> None:
        """Stop serving."""
        self.board.close()
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(10.0)
        self._listener.close()
        self._reader.close()
        self._snapshot.close()

    def __enter__(self) -> "MemberHub":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
