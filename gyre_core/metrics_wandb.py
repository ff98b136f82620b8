"""A run's scalars in Weights & Biases, when its configuration names a project. The package is an optional extra.

What W&B's own variables say holds (WANDB_API_KEY, WANDB_MODE=offline, WANDB_BASE_URL, ...). Enters: scalars of a step.
Leaves: a W&B run with the Gyre run's name as its id, so that a resumed run goes on in the same charts.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gyre_core.errors import SetupError

_STEP = "step"  # the charts' axis: W&B's own counter may not go back, and evaluations come late


class WandbScalars:
    """See the module. Example: WandbScalars("coding-agents", run_id="r1", folder=Path("runs/r1"), config={})"""

    def __init__(self, project: str, *, run_id: str, folder: Path, config: Mapping[str, Any]) -> None:
        """Raises SetupError when the package is missing or W&B does not take the run."""
        try:
            import wandb
        except ImportError as error:
            raise SetupError(
                'metrics.wandb_project needs the package wandb: `pip install "gyre-rl[wandb]"`, or leave it out'
            ) from error
        try:
            self._run = wandb.init(
                project=project,
                id=run_id,
                name=run_id,
                dir=str(folder),
                config=dict(config),
                resume="allow",
                settings=wandb.Settings(console="off", silent=True),
            )
        except (wandb.Error, OSError) as error:
            raise SetupError(
                f"W&B does not take the run: {error}. Set WANDB_API_KEY, or WANDB_MODE=offline to keep it in "
                f"{folder / 'wandb'} for `wandb sync`, or remove metrics.wandb_project"
            ) from error
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Scalars of a step."""
        self._run.log({_STEP: step, **values})

    def close(self) -> None:
        """Send or write what is left."""
        self._run.finish()
