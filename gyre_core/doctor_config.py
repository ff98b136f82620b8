"""Whether a configuration can run: layout, memory, staleness and what moves, worked out without a GPU or weights.

Enters: a RunConfig, and a cluster file when the machines are not this one. Leaves: checks as `gyre doctor` shows them.
`missing` means that the run would fail or that this version of Gyre refuses the layout; `warn` that it would be slow or
tight. Without a cluster file the machine is this one and the layout the configuration's own.
"""

import psutil
from pydantic import ValidationError

from gyre_core.config import RunConfig
from gyre_core.doctor import Check
from gyre_core.errors import ConfigError
from gyre_core.sizing import (
    GIB,
    Cluster,
    DeviceMemory,
    Layout,
    Shape,
    checkpoint_bytes,
    gradient_bytes,
    kv_bytes_per_token,
    layout_problems,
    read_shape,
    serving_memory,
    training_memory,
    usable_bytes,
    weight_bytes,
)

# Task runs of a step beside those of its rollouts and groups: dispatch, train, publish, commit, rebalance.
_TASKS_A_STEP = 6
_TASKS_A_ROLLOUT = 3  # execute, grade, process
_TASKS_A_SECOND = 250.0  # one Prefect server takes (measured, threads on a local server)


def config_checks(config: RunConfig, cluster: Cluster | None = None) -> list[Check]:
    """All checks, in the order a reader mends them."""
    try:
        shape = read_shape(config.model.path)
    except ConfigError as error:
        return [Check(name="model", ok="missing", detail=str(error))]
    layout = cluster.layout if cluster is not None else _own_layout(config)
    engines = 1
    if cluster is not None:
        gpus = cluster.machines.nodes * cluster.machines.gpus_per_node // config.scheduler.cells
        engines = max(1, gpus // layout.engine_gpus)
    checks = [_model(shape), _layout(shape, layout), _staleness(config), _context(config, engines)]
    if cluster is None:
        return [*checks, _this_machine(config, shape, layout), _prefect(config)]
    return [
        *checks,
        _devices(config, cluster),
        _training(config, shape, cluster),
        _serving(config, shape, cluster),
        _parked(config, shape, cluster),
        _moved(config, shape, cluster),
        _prefect(config),
        _runs_today(config, layout),
    ]


def _own_layout(config: RunConfig) -> Layout:
    train = config.train
    return Layout(tensor_parallel=train.tensor_parallel, data_parallel=train.data_parallel)


def _model(shape: Shape) -> Check:
    detail = f"{shape.parameters / 1e9:.3g} billion parameters"
    if shape.experts:
        detail += (
            f", {shape.active_parameters / 1e9:.3g} active a token ({shape.experts} experts, {shape.layers} layers)"
        )
    return Check(name="model", ok="ok", detail=detail)


def _layout(shape: Shape, layout: Layout) -> Check:
    problems = layout_problems(shape, layout)
    if problems:
        return Check(name="layout", ok="missing", detail="; ".join(problems))
    parts = {
        "tensor": layout.tensor_parallel,
        "pipeline": layout.pipeline_parallel,
        "expert": layout.expert_parallel,
        "data": layout.data_parallel,
    }
    shown = " x ".join(f"{name} {count}" for name, count in parts.items() if count > 1 or name == "tensor")
    return Check(name="layout", ok="ok", detail=f"{shown}: {layout.gpus} processes a cell, everything divides")


def _staleness(config: RunConfig) -> Check:
    k, rollout = config.scheduler.staleness, config.rollout
    flying = (k + 1) * rollout.groups_per_step * rollout.group_size
    step = rollout.groups_per_step * rollout.group_size
    detail = (
        f"k = {k}: step s trains groups dispatched at version max(0, s - {k}), so at most {k} versions old; "
        f"{k + 1} steps of {rollout.groups_per_step} x {rollout.group_size} = {step} rollouts are dispatched at once, "
        f"{flying} in all, for {rollout.slots} slots"
    )
    if rollout.slots > flying:
        return Check(
            name="staleness",
            ok="warn",
            detail=f"{detail}: {rollout.slots - flying} slots never have work; lower rollout.slots to {flying}, or "
            "raise scheduler.staleness or rollout.groups_per_step",
        )
    return Check(name="staleness", ok="ok", detail=f"{detail} ({flying / rollout.slots:.1f} rollouts a slot)")


def _context(config: RunConfig, engines: int) -> Check:
    length, slots = config.model.context_length, config.slots_per_cell
    held = engines * config.engine.max_total_tokens
    detail = (
        f"a cell's {engines} engine(s) hold {held:,} KV tokens for {slots} slots: {held // slots:,} each, of contexts "
        f"of {length:,}; a rollout may sample {config.rollout.max_rollout_tokens:,} tokens"
    )
    if held >= slots * length:
        return Check(name="context", ok="ok", detail=detail)
    detail += "; while many are longer than their share, keys and values are computed again or come from the KV store"
    return Check(name="context", ok="warn", detail=detail)


def _this_machine(config: RunConfig, shape: Shape, layout: Layout) -> Check:
    train = _memory(config, shape, layout)
    weights, kv = serving_memory(
        shape, Layout(engine_gpus=1), dtype=config.engine.dtype, kv_tokens=config.engine.max_total_tokens
    )
    cells = config.scheduler.cells
    needed = cells * (train.satellite * layout.gpus + weights + kv) + train.optimizer * layout.gpus
    total = psutil.virtual_memory().total
    detail = (
        f"{cells} trainer(s) and engine(s) in host memory: {needed / GIB:.2f} GiB of tensors (weights, gradients, "
        f"optimizer, activations, KV), beside about 2.7 GB of programs a cell, of {total / GIB:.0f} GiB"
    )
    fits = needed + cells * 2.7e9 < 0.9 * total
    return Check(name="memory", ok="ok" if fits else "missing", detail=detail)


def _devices(config: RunConfig, cluster: Cluster) -> Check:
    machines, cells = cluster.machines, config.scheduler.cells
    gpus = machines.nodes * machines.gpus_per_node
    each = gpus // cells
    per_cell = f"{machines.nodes} nodes x {machines.gpus_per_node} GPUs for {cells} cells: {each} GPUs a cell"
    if cluster.layout.gpus > each:
        return Check(
            name="devices",
            ok="missing",
            detail=f"{per_cell}, but the layout needs {cluster.layout.gpus}; lower scheduler.cells or the layout",
        )
    if each % cluster.layout.engine_gpus:
        return Check(
            name="devices",
            ok="missing",
            detail=f"{per_cell}, which engine_gpus ({cluster.layout.engine_gpus}) does not divide: some would idle",
        )
    engines = each // cluster.layout.engine_gpus
    idle = each - cluster.layout.gpus
    detail = f"{per_cell}, {engines} engine(s) of {cluster.layout.engine_gpus} in each"
    if idle:
        return Check(name="devices", ok="warn", detail=f"{detail}; {idle} of them idle while the cell trains")
    if each % machines.gpus_per_node and machines.gpus_per_node % each:
        return Check(name="devices", ok="warn", detail=f"{detail}; a cell's border runs through a node")
    return Check(name="devices", ok="ok", detail=detail)


def _memory(config: RunConfig, shape: Shape, layout: Layout) -> DeviceMemory:
    train = config.train
    return training_memory(shape, layout, dtype=train.dtype, tokens=train.micro_step_tokens, recompute=train.recompute)


def _training(config: RunConfig, shape: Shape, cluster: Cluster) -> Check:
    memory, usable = _memory(config, shape, cluster.layout), usable_bytes(cluster.machines.gpu_memory_gib)
    detail = (
        f"a core's GPU holds {_gib(memory.core)}: weights {_gib(memory.weights)}, gradients {_gib(memory.gradients)}, "
        f"optimizer {_gib(memory.optimizer)}, activations {_gib(memory.activations)}; a satellite's "
        f"{_gib(memory.satellite)}; usable {_gib(usable)}"
    )
    if memory.core <= usable:
        return Check(name="training memory", ok="ok", detail=detail)
    advice = "more GPUs a cell (fewer cells), "
    advice += "train.recompute = true, " if not config.train.recompute else "a smaller train.micro_step_tokens, "
    return Check(name="training memory", ok="missing", detail=f"{detail}: does not fit; {advice}or larger GPUs")


def _serving(config: RunConfig, shape: Shape, cluster: Cluster) -> Check:
    layout, engine = cluster.layout, config.engine
    weights, kv = serving_memory(shape, layout, dtype=engine.dtype, kv_tokens=engine.max_total_tokens)
    usable = usable_bytes(cluster.machines.gpu_memory_gib)
    one = kv_bytes_per_token(shape, dtype=engine.dtype)
    detail = (
        f"an engine's GPU holds weights {_gib(weights)} and KV {_gib(kv)} ({one / 1024:.0f} KiB a token over "
        f"{min(layout.engine_gpus, shape.kv_heads)} GPUs) of {_gib(usable)}"
    )
    if weights + kv <= usable:
        return Check(name="serving memory", ok="ok", detail=detail)
    room = max(0.0, usable - weights) / one * min(layout.engine_gpus, shape.kv_heads)
    return Check(
        name="serving memory",
        ok="missing",
        detail=f"{detail}: engine.max_total_tokens may be {int(room):,} at most, or raise engine_gpus",
    )


def _parked(config: RunConfig, shape: Shape, cluster: Cluster) -> Check:
    """While a cell serves, its trainer's state waits in host memory, beside what the node lends to the KV store."""
    machines, layout = cluster.machines, cluster.layout
    memory = _memory(config, shape, layout)
    per_node = min(machines.gpus_per_node, layout.gpus) * (memory.weights + memory.optimizer)
    store = config.engine.kv_store_bytes if config.engine.kv_store != "none" else 0
    needed, host = per_node + store, machines.host_memory_gib * GIB
    detail = f"a core's node parks {_gib(per_node)} of trainer state and lends {_gib(store)} to the KV store"
    return Check(name="host memory", ok="ok" if needed < 0.8 * host else "missing", detail=f"{detail} of {_gib(host)}")


def _moved(config: RunConfig, shape: Shape, cluster: Cluster) -> Check:
    machines, cells = cluster.machines, config.scheduler.cells
    nodes = max(1, machines.nodes // cells)
    wire = nodes * machines.network_gb_s * 1e9
    weights, gradients = weight_bytes(shape, dtype=config.engine.dtype), gradient_bytes(shape)
    checkpoint = checkpoint_bytes(shape, dtype=config.train.dtype)
    detail = (
        f"a publication moves {weights / 1e9:.0f} GB into each cell ({weights / wire:.1f} s over {nodes} node(s)), a "
        f"satellite hands {gradients / 1e9:.0f} GB of gradients to the core ({gradients / wire:.1f} s; {cells - 1} of "
        f"them one after the other {(cells - 1) * gradients / wire:.0f} s), a checkpoint writes "
        f"{checkpoint / 1e9:.0f} GB ({checkpoint / machines.store_gb_s / 1e9:.0f} s at {machines.store_gb_s:g} GB/s)"
    )
    return Check(name="traffic", ok="ok", detail=detail)


def _prefect(config: RunConfig) -> Check:
    rollout = config.rollout
    rollouts = rollout.groups_per_step * rollout.group_size
    tasks = _TASKS_A_ROLLOUT * rollouts + rollout.groups_per_step + _TASKS_A_STEP
    return Check(
        name="prefect load",
        ok="ok",
        detail=f"{tasks} task runs a step, {tasks / _TASKS_A_SECOND:.1f} s of one server's time at "
        f"{_TASKS_A_SECOND:g} task runs a second",
    )


def _runs_today(config: RunConfig, layout: Layout) -> Check:
    """Whether this version trains that way at all; the arithmetic above does not ask."""
    tree = config.model_dump(mode="python")
    for name in ("tensor_parallel", "pipeline_parallel", "expert_parallel", "data_parallel"):
        tree["train"][name] = getattr(layout, name)
    try:
        RunConfig.model_validate(tree)
    except ValidationError as error:
        reasons = "; ".join(str(item["msg"]).removeprefix("Value error, ") for item in error.errors())
        return Check(name="this version", ok="missing", detail=f"does not train in this layout yet: {reasons}")
    return Check(name="this version", ok="ok", detail="trains in this layout (GPU builds are untested so far)")


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"
