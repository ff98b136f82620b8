"""What a person sees in the terminal while a run goes on: one live line block, or plain lines when it is no terminal.

Goes to standard error, so that standard output holds nothing but the final JSON object.
"""

import threading
import time
from collections import Counter
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text


class RunProgress:
    """Thread-safe counters and their picture.

    Example: with RunProgress("quickstart", num_steps=8) as progress: progress.begin("step 1", num_rollouts=48)
    """

    def __init__(self, run_id: str, *, num_steps: int, quiet: bool = False) -> None:
        self._console = Console(stderr=True, quiet=quiet)
        self._run_id = run_id
        self._num_steps = num_steps
        self._lock = threading.Lock()
        self._started = time.monotonic()
        self._first_step_at: float | None = None
        self._steps_done = 0
        self._steps_at_start = 0
        self._phase = "starting"
        self._rollouts_done = 0
        self._rollouts_total = 0
        self._outcomes: Counter[str] = Counter()
        self._rewards: list[float] = []
        self._last: dict[str, float] = {}
        self._live = Live(self, console=self._console, refresh_per_second=4) if self._console.is_terminal else None

    def __enter__(self) -> "RunProgress":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def note(self, text: str) -> None:
        """One line that stays."""
        elapsed = time.monotonic() - self._started
        self._console.print(Text(f"[{elapsed:6.1f} s] {text}"), highlight=False, soft_wrap=True)

    def resume_at(self, step: int) -> None:
        """Steps below `step` were done by an earlier process."""
        with self._lock:
            self._steps_done = self._steps_at_start = step

    def begin(self, phase: str, *, num_rollouts: int = 0) -> None:
        """A new phase; counters of rollouts start again when it has any."""
        with self._lock:
            self._phase = phase
            if num_rollouts:
                self._rollouts_done, self._rollouts_total = 0, num_rollouts
                self._outcomes.clear()
                self._rewards.clear()
            if self._first_step_at is None and phase.startswith("step"):
                self._first_step_at = time.monotonic()

    def rollout_done(self, outcome: str, reward: float | None) -> None:
        """One rollout has its grade."""
        with self._lock:
            self._rollouts_done += 1
            self._outcomes[outcome] += 1
            if reward is not None:
                self._rewards.append(reward)

    def step_done(self, step: int, values: dict[str, float]) -> None:
        """An optimizer step is committed; `values` has reward, staleness, grad_norm."""
        with self._lock:
            self._steps_done = step + 1
            self._last = values
            eta_s = self._eta_s()
        self.note(
            f"step {step + 1}/{self._num_steps}  reward {values['reward']:.3f}  groups {values['groups']:.0f}"
            f" (dropped {values['dropped']:.0f})  grad norm {values['grad_norm']:.3f}"
            f"  staleness {values['staleness']:.0f}  rollout {values['rollout_s']:.0f} s"
            f"  train {values['train_s']:.0f} s" + (f"  ETA {_duration(eta_s)}" if eta_s is not None else "")
        )

    def _eta_s(self) -> float | None:
        done = self._steps_done - self._steps_at_start
        if self._first_step_at is None or done <= 0:
            return None
        return (time.monotonic() - self._first_step_at) / done * (self._num_steps - self._steps_done)

    def __rich__(self) -> Table:
        with self._lock:
            table = Table.grid(padding=(0, 2))
            mean = f"{sum(self._rewards) / len(self._rewards):.3f}" if self._rewards else "–"
            outcomes = ", ".join(f"{name} {count}" for name, count in sorted(self._outcomes.items())) or "–"
            eta_s = self._eta_s()
            table.add_row(
                Text(self._run_id, style="bold"),
                f"{self._phase}",
                f"rollouts {self._rollouts_done}/{self._rollouts_total}",
                f"reward {mean}",
                f"elapsed {_duration(time.monotonic() - self._started)}",
                f"ETA {_duration(eta_s)}" if eta_s is not None else "",
            )
            table.add_row("", f"outcomes: {outcomes}")
            return table


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
