"""What emulated cells and rollouts cost: the configuration section `[emulate]`, and the cost model as pure functions.

Enters: a cluster's costs in its own seconds. Leaves: how long a token, a prompt, a micro-step, a role change takes
there. An emulated run does the same work in wall seconds: the cluster's divided by `compression`. Costs are of emulated
tokens: whoever makes the section decides how many of the cluster's tokens one of them stands for.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Cost = Annotated[float, Field(ge=0)]


class _Section(BaseModel):
    """As gyre_core.config.models.Section, which imports this module."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class EngineCosts(_Section):
    """An engine of one cell.

    Example: EngineCosts(alpha_s=0.5, beta_s=0.01).token_s(50) == 1.0
    """

    alpha_s: Annotated[float, Field(gt=0)] = 0.02  # of a decoding step, whatever runs in it
    beta_s: Cost = 0.0002  # of a decoding step for each call in it
    gamma_s: Cost = 0.0  # of a decoding step for each token of context that it reads
    prefill_s: Cost = 0.0001  # of a prompt token that no cache holds
    move_s: Cost = 0.00001  # of a prompt token whose keys and values another engine has computed (kv = "move")
    kv: Literal["move", "recompute"] = "move"  # what a call costs that goes on elsewhere

    def token_s(self, num_calls: int, context_tokens: float = 0.0) -> float:
        """tau(b): seconds between two tokens of each call when `num_calls` decode together."""
        return self.alpha_s + self.beta_s * num_calls + self.gamma_s * context_tokens


class TrainCosts(_Section):
    """A trainer of one cell.

    Example: TrainCosts(token_s=0.01, micro_step_s=1.0).compute_s(400) == 5.0
    """

    token_s: Cost = 0.001  # of a token of a packed micro-step: what branches share counts once
    micro_step_s: Cost = 0.0
    optimizer_s: Cost = 20.0

    def compute_s(self, num_tokens: int) -> float:
        """Seconds of forward and backward of one packed micro-step."""
        return self.micro_step_s + self.token_s * num_tokens


class SwitchCosts(_Section):
    """What a role change and a publication take beside the work. The defaults are the published means."""

    to_train_s: Cost = 8.52
    to_rollout_s: Cost = 3.46
    publish_s: Cost = 10.0  # weights into one engine
    checkpoint_s: Cost = 0.0  # what the trainer stands still for


class Workload(_Section):
    """Rollouts by chance: lengths are log-normal, with a factor that all rollouts of a group share.

    A rollout is `segments` pairs of a model call and a tool. Everything is drawn from the seed and the rollout's id
    alone, so every policy gets the same work.
    """

    seed: Annotated[int, Field(ge=0)] = 0
    sampled_tokens: Annotated[float, Field(gt=0)] = 40.0  # mean of a rollout
    max_tokens: Annotated[float, Field(gt=0)] = 250.0  # sampled; a rollout ends here at the latest
    sigma_group: Cost = 0.5  # of the logarithm, common to a group
    sigma_rollout: Cost = 0.5  # of the logarithm, each rollout's own
    segments: Annotated[int, Field(ge=1)] = 6
    unique_ratio: Annotated[float, Field(ge=1)] = 3.0  # all tokens of a rollout for each sampled one
    prompt_tokens: Annotated[int, Field(ge=1)] = 8
    tool_s: Cost = 600.0  # mean of all tools of a rollout, in proportion to its length
    tool_sigma: Cost = 0.8  # of the logarithm
    failing_share: Annotated[float, Field(ge=0, le=1)] = 0.0  # end early for reasons outside and are excluded
    signal_share: Annotated[float, Field(ge=0, le=1)] = 1.0  # of groups whose rewards differ
    grade_s: Cost = 60.0  # of the verifier
    plans: Annotated[Path, Field(strict=False)] | None = None  # JSON file: what each rollout does, instead of chance


class EmulationConfig(_Section):
    """Cells and rollouts that take the time a cost model says. The control plane is the real one.

    Example: EmulationConfig(compression=300.0)
    """

    compression: Annotated[float, Field(gt=0)] = 100.0  # the cluster's seconds in one second of the wall
    engine: EngineCosts = EngineCosts()
    train: TrainCosts = TrainCosts()
    switch: SwitchCosts = SwitchCosts()
    workload: Workload = Workload()

    def wall_s(self, seconds: float) -> float:
        """The cluster's seconds as wall seconds."""
        return seconds / self.compression


def account_path(work_dir: Path, cell_id: str) -> Path:
    """Where an emulated cell writes what it did."""
    return work_dir / "emulated" / f"{cell_id}.json"
