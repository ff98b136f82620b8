"""The sections of a run's configuration.

Strict pydantic: unknown keys are refused, numbers have bounds, and rules that span sections are checked in RunConfig
with messages that say what to change. A function takes its own section, never the whole RunConfig.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from gyre_core.config.emulation import EmulationConfig
from gyre_core.types import Role

Positive = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]
LaxPath = Annotated[Path, Field(strict=False)]  # TOML has no paths: strings are taken
LaxRole = Annotated[Role, Field(strict=False)]
Slug = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys refused, no silent coercion."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelConfig(Section):
    """The policy that is trained."""

    path: LaxPath  # folder with config.json, tokenizer and *.safetensors (Hugging Face layout)
    renderer: Literal["auto", "qwen3"] = "auto"  # message-to-token renderer; auto picks by the model's config.json
    context_length: Positive = 16384  # tokens of prompt and output together, engine and trainer alike


class DataConfig(Section):
    """Where the problems are: folders of Harbor task directories."""

    train: LaxPath  # folder of problems that are trained on
    heldout: LaxPath | None = None  # folder of problems that are only evaluated


class HarnessConfig(Section):
    """The agent program that a rollout runs, unmodified. `{instruction}` and `{base_url}` are filled in."""

    name: Slug = "quickstart-agent"  # selects the role table (gyre_core/trajectory/roles.py)
    version: str = "1"  # recorded with each session
    dialect: Literal["messages", "chat", "responses"] = "messages"  # the API that the harness speaks
    command: tuple[str, ...] = Field(min_length=1, strict=False)  # the program and its arguments
    env: dict[str, str] = Field(default_factory=dict)  # further environment variables
    read_only: tuple[LaxPath, ...] = Field(default=(), strict=False)  # further paths the sandbox may read


class ContainerConfig(Section):
    """Containers of docker or podman, when rollout.sandbox names one of them."""

    image: str = ""  # on this machine already: no run pulls one
    network: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")] = "host"  # the proxy listens on 127.0.0.1
    memory_bytes: Positive | None = None  # of one container; None: not bounded
    cpus: Annotated[float, Field(gt=0)] | None = None


class RolloutConfig(Section):
    """How rollouts are sampled and bounded."""

    harness: HarnessConfig
    group_size: Annotated[int, Field(ge=1)] = 16  # rollouts of one problem (published: 16)
    groups_per_step: Positive = 8  # B: groups that one optimizer step trains
    slots: Positive = 8  # rollouts that all cells together serve at once; shared out evenly
    time_limit_s: Seconds = 3600.0  # of the harness; a rollout that reaches it is graded for what it left
    overall_limit_s: Seconds = 7200.0  # of harness and verifier together; beyond it the rollout is excluded
    max_calls: Positive = 1000  # model calls of one rollout
    max_rollout_tokens: Positive = 1_000_000  # sampled tokens of one rollout
    max_new_tokens: Positive = 8192  # of one call, whatever the harness asks for
    temperature: Annotated[float, Field(gt=0, le=2)] = 1.0  # of sampling, also where log-probs are taken
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0  # 1 in training: anything else biases the recorded log-probs
    top_k: Annotated[int, Field(ge=-1)] = -1  # -1: no limit
    # auto: the first of bubblewrap and namespaces that works here
    sandbox: Literal["auto", "bubblewrap", "namespaces", "docker", "podman"] = "auto"
    container: ContainerConfig = ContainerConfig()

    @model_validator(mode="after")
    def _check(self) -> "RolloutConfig":
        if self.top_p != 1.0 or self.top_k != -1:
            raise ValueError(
                "rollout.top_p and rollout.top_k must stay 1.0 and -1: the engine's log-probs are not renormalised for "
                "them, so training would be biased; use rollout.temperature instead"
            )
        if self.sandbox in ("docker", "podman") and not self.container.image:
            raise ValueError(
                f'rollout.sandbox = "{self.sandbox}" needs rollout.container.image: the image that harness and '
                "verifier run in"
            )
        if self.overall_limit_s <= self.time_limit_s:
            raise ValueError(
                f"rollout.overall_limit_s ({self.overall_limit_s:g}) must exceed rollout.time_limit_s "
                f"({self.time_limit_s:g}): the verifier needs time of its own"
            )
        return self


class GradingConfig(Section):
    """The verifier's budget and what counts as a failure of the infrastructure."""

    timeout_s: Seconds = 600.0  # one verifier run, when the problem's task.toml names none
    attempts: Annotated[int, Field(ge=1, le=10)] = 2  # runs of a verifier that fails without a verdict
    no_artifact: Literal["exclude", "zero"] = "exclude"  # "zero" is the published placeholder
    # Training rollouts whose workspace is archived in the store, for `gyre replay --regrade`: those with a reward, or
    # every one that left a workspace.
    keep_workspaces: Literal["none", "graded", "all"] = "none"
    keep_quota_bytes: Positive = 4 * 2**30  # of all archives of a run; what goes beyond it is not kept
    keep_workspace_bytes: Positive = 64 * 2**20  # of one workspace's files; a larger one is not kept


class SelectionConfig(Section):
    """Group advantage and which branches are trained (trajectories.md sections 5 and 6)."""

    max_branches: Annotated[int, Field(ge=0)] = 5  # J; 0 is uncapped
    min_group: Annotated[int, Field(ge=1)] = 2  # included members below which a group is dropped
    advantage_eps: Annotated[float, Field(ge=0)] = (
        1e-6  # added to the standard deviation that advantages are divided by
    )
    role_order: tuple[LaxRole, ...] = Field(
        default=(Role.MAIN, Role.MAIN_SUMMARY, Role.SUB_AGENT, Role.SUB_AGENT_SUMMARY), strict=False
    )

    @model_validator(mode="after")
    def _check(self) -> "SelectionConfig":
        if Role.AUX in self.role_order:
            raise ValueError("selection.role_order must not hold 'aux': auxiliary calls are never trained")
        if not self.role_order or len(set(self.role_order)) != len(self.role_order):
            raise ValueError("selection.role_order must name each role at most once and at least one role")
        return self


# Each loss's published range; gyre_core/train/loss.py names the sources. Plain policy gradient has no ratio to clip.
CLIP_RANGES: dict[str, tuple[float, float]] = {
    "gspo": (3e-4, 4e-4),
    "gspo_token": (3e-4, 4e-4),
    "grpo": (0.2, 0.2),
    "cispo": (1.0, 4.0),
    "policy_gradient": (0.0, 0.0),
}


_REFUSED_PARALLELISM = {
    "pipeline_parallel": "micro-steps are forests of unequal shape, and Megatron's pipeline passes tensors of one "
    "shape between stages; use train.tensor_parallel, or more cells",
    "expert_parallel": "experts are exchanged along the sequence, which tree packing does not split; use more cells",
    "context_parallel": "tree packing needs all ancestors of a token in one process, and context parallelism cuts the "
    "sequence at places that know no tree; lower train.micro_step_tokens or set train.recompute",
}


class TrainConfig(Section):
    """Loss and optimizer."""

    steps: Annotated[int, Field(ge=0)] = 10  # optimizer steps of the whole run
    learning_rate: Annotated[float, Field(ge=0)] = 1e-6  # of the first step
    learning_rate_decay: Literal["none", "linear"] = "none"  # linear: falls to 0 after the last of `steps`
    weight_decay: Annotated[float, Field(ge=0)] = 0.0  # of AdamW
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9  # of AdamW
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.98  # of AdamW
    grad_clip: Annotated[float, Field(gt=0)] = 1.0  # largest norm of the whole gradient
    loss: Literal["gspo", "gspo_token", "grpo", "cispo", "policy_gradient"] = "gspo"
    unit: Literal["branch", "rollout"] = "branch"  # whose targets share one GSPO ratio
    # The ratio's range is [1 - clip_low, 1 + clip_high]. None: the loss's own, see CLIP_RANGES.
    clip_low: Annotated[float, Field(gt=0, le=1)] | None = None
    clip_high: Annotated[float, Field(gt=0, le=100)] | None = None
    reference: Literal["sampler", "burst_start"] = "sampler"  # what the ratio, and the KL term, compare with
    kl_coefficient: Annotated[float, Field(ge=0, le=10)] = 0.0  # of the k3 divergence from the reference; 0: no term
    micro_step_tokens: Positive = 16384  # packed tokens of one micro-step
    share_prefixes: bool = True  # compute what branches of a micro-step share once; false: each branch by itself
    recompute: bool = False  # recompute activations in the backward pass
    dtype: Literal["float32", "bfloat16"] = "float32"  # of weights and activations; sums and the optimizer stay fp32
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1  # processes of a cell that share one copy of the weights
    data_parallel: Annotated[int, Field(ge=1, le=64)] = 1  # such copies in a cell, each with micro-steps of its own
    pipeline_parallel: int = 1  # these three are refused: see _check
    expert_parallel: int = 1
    context_parallel: int = 1
    keep_checkpoints: Positive = 2  # every committed step has one; older ones are removed
    keep_every: Annotated[int, Field(ge=0)] = 0  # of the older ones, keep those of every N-th step; 0: none
    export_every: Annotated[int, Field(ge=0)] = 0  # steps between Hugging Face exports into the run folder; 0: none
    threads: Annotated[int, Field(ge=0)] = 0  # CPU threads of the trainer, 0 = all cores

    @model_validator(mode="after")
    def _check(self) -> "TrainConfig":
        for name, reason in _REFUSED_PARALLELISM.items():
            if getattr(self, name) != 1:
                raise ValueError(f"train.{name} must be 1: {reason}")
        if self.loss == "policy_gradient" and not (self.clip_low is None and self.clip_high is None):
            raise ValueError(
                'train.loss = "policy_gradient" has no ratio to clip: remove train.clip_low and train.clip_high, or '
                'use "grpo"'
            )
        if self.unit == "rollout" and not self.loss.startswith("gspo"):
            raise ValueError(
                f'train.unit = "rollout" says whose tokens share a GSPO ratio, but train.loss = "{self.loss}" has a '
                "ratio for each token: remove train.unit"
            )
        return self

    @property
    def clip_range(self) -> tuple[float, float]:
        """(clip_low, clip_high), the loss's own where they are not set."""
        low, high = CLIP_RANGES[self.loss]
        return (low if self.clip_low is None else self.clip_low, high if self.clip_high is None else self.clip_high)

    @property
    def zero_advantage_trains(self) -> bool:
        """Whether a rollout with advantage 0 has a gradient: only through the KL term."""
        return self.kl_coefficient > 0

    def learning_rate_at(self, step: int) -> float:
        """Learning rate of optimizer step `step`, from 0."""
        if self.learning_rate_decay == "none":
            return self.learning_rate
        return self.learning_rate * max(0.0, 1.0 - step / max(1, self.steps))


class SchedulerConfig(Section):
    """Cells, and who owns them when. Cell 0 is the core: it holds the weights of record and takes the optimizer steps.

    Policies (gyre_core/scheduler/policy.py): `elastic` moves cells to training one by one as the rollouts of a burst
    finish; `elastic_predictive` looks further; `colocate` moves all at once; `async_stream` and `async_off1` keep a
    fixed split.
    """

    policy: Literal["elastic", "elastic_predictive", "colocate", "async_stream", "async_off1"] = "elastic"
    cells: Annotated[int, Field(ge=1, le=64)] = 1  # each an engine and a trainer; rollout.slots are shared out evenly
    train_cells: Annotated[int, Field(ge=1, le=63)] = 1  # of the fixed split: the first so many only train
    burst_steps: Literal[1] = 1  # mu: optimizer steps between two publications
    staleness: Annotated[int, Field(ge=0, le=16)] = 0  # k = phi + mu - 1: versions between dispatch and training
    heartbeat_s: Seconds = 2.0  # between two looks at each cell
    dead_after_s: Seconds = 20.0  # a cell that does not answer for so long is killed and started again
    nodes_per_cell: Annotated[int, Field(ge=1, le=64)] = 1  # machines that share a cell's trainer (docs/cluster.md)
    nodes_port: Annotated[int, Field(ge=1, le=65000)] = 8300  # where the further nodes of cell 0 come; cell i: + i
    work_pool: str | None = None  # Prefect pool whose workers start the cells; None: this process does
    hosts: tuple[str, ...] = Field(default=(), strict=False)  # with a work_pool: each cell's machine, cell 0 first

    @model_validator(mode="after")
    def _check(self) -> "SchedulerConfig":
        if self.policy.startswith("async") and self.train_cells >= self.cells:
            raise ValueError(
                f'scheduler.policy = "{self.policy}" needs cells that serve: scheduler.train_cells '
                f"({self.train_cells}) must be below scheduler.cells ({self.cells})"
            )
        if self.hosts and (self.work_pool is None or len(self.hosts) != self.cells):
            raise ValueError(
                f"scheduler.hosts names {len(self.hosts)} machines for {self.cells} cells: give one address a cell, "
                "and scheduler.work_pool, whose workers start them there"
            )
        return self


class EngineConfig(Section):
    """The SGLang server of a cell."""

    python: LaxPath | None = None  # interpreter that has sglang; None: .venv-engine, else own
    max_total_tokens: Positive = 65536  # KV pool
    dtype: Literal["float32", "bfloat16"] = "float32"
    boot_timeout_s: Seconds = 300.0  # until the engine answers
    call_timeout_s: Seconds = 600.0  # of one model call
    threads: Annotated[int, Field(ge=1)] = 1  # OMP threads
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1  # devices of its machine that share one copy of the weights
    nodes: Annotated[int, Field(ge=1, le=64)] = 1  # machines of the cell that share it: 1, or all of them
    # Keys and values that the engines of a run share, so that a call that moves to another engine computes little anew.
    kv_store: Literal["none", "mooncake"] = "none"
    kv_store_bytes: Annotated[int, Field(ge=16 * 2**20)] = 2**30  # host memory that each engine lends to the store
    kv_host_ratio: Annotated[float, Field(ge=1, le=64)] = 2.0  # an engine's host copies, in multiples of its KV pool
    kv_page_tokens: Annotated[int, Field(ge=1, le=256)] = 16  # shared as whole pages: fewer tokens move more exactly
    extra_args: tuple[str, ...] = Field(default=(), strict=False)  # further arguments of SGLang's server


class ProxyConfig(Section):
    """The TITO proxy: what it may take, and how many processes share a run's sessions.

    Calls, sampled tokens and time of one rollout are bounded in `[rollout]`; its session has the same bounds.
    """

    processes: Annotated[int, Field(ge=1, le=64)] = 1  # sessions are sharded by rollout; one serves some hundred
    journal_sync: Literal["call", "session"] = "call"  # fsync each finished call, or only a session's begin and end
    keepalive_s: Annotated[float, Field(gt=0, le=20)] = 15.0  # longest silence towards a harness that waits
    max_body_bytes: Positive = 16 * 2**20  # of one request; a history of a million tokens is 5 to 10 MB
    role_tables: tuple[dict[str, Any], ...] = Field(default=(), strict=False)  # asked before the built-in ones


class StoreConfig(Section):
    """Trajectories, manifests and checkpoints. None: `<run folder>/store`."""

    url: str | None = None  # a folder, or s3://bucket/prefix
    min_free_bytes: Annotated[int, Field(ge=0)] = 256 * 2**20  # refuse to start, and stop cleanly, below this


class TransferConfig(Section):
    """How weights reach engines. `auto`: Mooncake when it loads, else through local shared files."""

    backend: Literal["auto", "mooncake", "local"] = "auto"


class EvaluateConfig(Section):
    """Held-out evaluation before the first step, after the last, and in between."""

    every: Annotated[int, Field(ge=0)] = 0  # steps between evaluations; 0: only before and after
    samples: Positive = 1  # rollouts a problem
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0


class TracingConfig(Section):
    """OpenTelemetry traces of rollouts and steps (docs/tracing.md)."""

    export: Literal["none", "file", "otlp"] = "none"  # file: `<run folder>/traces`; otlp: a collector, and SGLang's own
    endpoint: Annotated[str, Field(pattern=r"^https?://[^\s]+$")] = "http://127.0.0.1:4318"  # of the collector
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0  # of the rollouts and steps


class MetricsConfig(Section):
    """Where a run's scalars go beside TensorBoard, `metrics.jsonl` and Prometheus."""

    wandb_project: str | None = None  # Weights & Biases, when its package is there; None: nothing is sent


class PrefectConfig(Section):
    """Where the run is shown. No api_url: a server of the run's own, on its own database."""

    api_url: str | None = None  # of a server that runs already; not set: PREFECT_API_URL, or one of our own
    port: Annotated[int, Field(ge=0, le=65535)] = 4200  # 0: any free port


class RunConfig(Section):
    """One run of training.

    Example: load_run_config(Path("examples/quickstart/run.toml"))
    """

    name: Slug  # of the run; its folder and flow run are named after it and the time
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0  # of problems, sampling and weights
    runs_dir: LaxPath = Path("runs")  # where run folders are made
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig
    grading: GradingConfig = GradingConfig()
    selection: SelectionConfig = SelectionConfig()
    train: TrainConfig = TrainConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    engine: EngineConfig = EngineConfig()
    transfer: TransferConfig = TransferConfig()
    proxy: ProxyConfig = ProxyConfig()
    store: StoreConfig = StoreConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    prefect: PrefectConfig = PrefectConfig()
    tracing: TracingConfig = TracingConfig()
    metrics: MetricsConfig = MetricsConfig()
    emulate: EmulationConfig | None = None  # cells and rollouts take the time of a cost model (gyre bench elastic)

    @model_validator(mode="after")
    def _check(self) -> "RunConfig":
        rollout, selection = self.rollout, self.selection
        if selection.min_group > rollout.group_size:
            raise ValueError(
                f"selection.min_group ({selection.min_group}) exceeds rollout.group_size ({rollout.group_size}): every "
                "group would be dropped; lower the one or raise the other"
            )
        if rollout.max_new_tokens >= self.model.context_length:
            raise ValueError(
                f"rollout.max_new_tokens ({rollout.max_new_tokens}) leaves no room for a prompt in "
                f"model.context_length ({self.model.context_length}); lower rollout.max_new_tokens"
            )
        if self.train.micro_step_tokens < self.model.context_length:
            raise ValueError(
                f"train.micro_step_tokens ({self.train.micro_step_tokens}) is below model.context_length "
                f"({self.model.context_length}): a full-length branch would fit no micro-step; raise it"
            )
        if self.engine.max_total_tokens < self.model.context_length:
            raise ValueError(
                f"engine.max_total_tokens ({self.engine.max_total_tokens}) is below model.context_length "
                f"({self.model.context_length}): the engine could not hold one full call; raise it"
            )
        if self.scheduler.hosts and self.engine.kv_store != "none":
            raise ValueError(
                'engine.kv_store must be "none" with scheduler.hosts: its master listens on this machine alone so far'
            )
        ranks, nodes = self.train.tensor_parallel * self.train.data_parallel, self.scheduler.nodes_per_cell
        if ranks % nodes:
            raise ValueError(
                f"the {ranks} processes of a cell's trainer (train.tensor_parallel x data_parallel) are not shared "
                f"evenly by scheduler.nodes_per_cell = {nodes}: change one of them"
            )
        if self.engine.nodes not in (1, nodes) or self.engine.tensor_parallel % self.engine.nodes:
            raise ValueError(
                f"engine.nodes ({self.engine.nodes}) must be 1 or scheduler.nodes_per_cell ({nodes}), and divide "
                f"engine.tensor_parallel ({self.engine.tensor_parallel})"
            )
        if self.scheduler.cells > rollout.slots:
            raise ValueError(
                f"scheduler.cells ({self.scheduler.cells}) exceeds rollout.slots ({rollout.slots}): each cell needs a "
                "slot of its own to serve a rollout; lower the one or raise the other"
            )
        if self.proxy.processes > rollout.slots:
            raise ValueError(
                f"proxy.processes ({self.proxy.processes}) exceeds rollout.slots ({rollout.slots}): each process needs "
                "a slot of its own to serve a session; lower the one or raise the other"
            )
        return self

    @property
    def clock_scale(self) -> float:
        """Seconds of the cluster in one second of the wall: 1 unless the run is emulated."""
        return self.emulate.compression if self.emulate is not None else 1.0

    @property
    def slots_per_cell(self) -> int:
        """Rollouts that one cell serves at once; all cells together have at least `rollout.slots`."""
        return -(-self.rollout.slots // self.scheduler.cells)
