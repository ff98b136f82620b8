"""What each process of Gyre shows Prometheus: status objects and a run's scalars as samples.

Names are `gyre_<process or area>_<quantity>[_<unit>]` with Prometheus's units. Everything is a gauge: a proxy's
counters are sums over the sessions that it still holds, so they may fall.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gyre_core.metrics_endpoint import Sample

_UNITS = {"_per_s": "_per_second", "_s": "_seconds", "_count": ""}  # of metric names (gyre_core/metrics.py)
_CELL_STATES = ("rollout", "draining", "training", "returning", "dead")


def scalar_samples(step: int, values: Mapping[str, float | None]) -> Iterator[Sample]:
    """A run's newest scalars (`train/grad_norm`, `rollout/duration_s`) and the step they belong to."""
    yield Sample(name="gyre_step", value=step)
    for name, value in values.items():
        if value is not None:
            yield Sample(name=prometheus_name(name), value=value)


def prometheus_name(name: str) -> str:
    """`rollout/duration_s` as `gyre_rollout_duration_seconds`.

    Example: prometheus_name("select/tokens_trained_count") == "gyre_select_tokens_trained"
    """
    for suffix, unit in _UNITS.items():
        if name.endswith(suffix):
            name = name.removesuffix(suffix) + unit
            break
    return "gyre_" + "".join(char if char.isalnum() else "_" for char in name)


def proxy_samples(status: Mapping[str, Any]) -> Iterator[Sample]:
    """A proxy process's status (Proxy.status())."""
    for name in ("sessions", "open_sessions", "calls", "in_flight", "waiting", "open_requests", "sampled_tokens"):
        yield Sample(name=f"gyre_proxy_{name}", value=_number(status.get(name)))
    yield Sample(name="gyre_proxy_pending_bytes", value=_number(status.get("pending_bytes")))
    yield Sample(name="gyre_proxy_policy_version", value=_number(status.get("policy_version")))
    for name, value in sorted(dict(status.get("counters", {})).items()):
        yield Sample(name="gyre_proxy_events", value=_number(value), labels={"event": str(name)})
    for engine in status.get("engines", ()):
        labels = {"engine": str(engine.get("url", ""))}
        for name, value in sorted(engine.items()):
            if isinstance(value, int | float) and not isinstance(value, bool):
                yield Sample(name=f"gyre_proxy_engine_{name}", value=value, labels=labels)


def cell_samples(status: Mapping[str, Any]) -> Iterator[Sample]:
    """A cell host's state (CellHost.describe())."""
    labels = {"cell": str(status["cell_id"])}
    for state in _CELL_STATES:
        value = float(status["state"] == state)
        yield Sample(name="gyre_cell_state", value=value, labels={**labels, "state": state})
    yield Sample(name="gyre_cell_epoch", value=_number(status["epoch"]), labels=labels)
    yield Sample(name="gyre_cell_policy_version", value=_number(status["policy_version"]), labels=labels)
    yield Sample(name="gyre_cell_served_version", value=_number(status.get("served_version")), labels=labels)
    yield from _step_samples(status.get("step"), labels)


def _step_samples(step: Mapping[str, Any] | None, labels: Mapping[str, str]) -> Iterable[Sample]:
    for name in ("groups", "pending", "leased", "completed", "taken", "requeued"):
        yield Sample(name=f"gyre_cell_step_{name}", value=_number((step or {}).get(name)), labels=labels)
    yield Sample(name="gyre_cell_step_trainers", value=len((step or {}).get("trainers") or ()), labels=labels)


def _number(value: Any) -> float:
    """0 for what is not there: curves have no holes."""
    return float(value) if isinstance(value, int | float) else 0.0
