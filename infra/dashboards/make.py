"""Write infra/dashboards/gyre.json: the Grafana dashboard of Gyre's metrics. Run it after changing it; a test compares.

Every panel is (title, unit, queries); names of metrics are those of gyre_core/metrics_samples.py and of a run's scalars
(tasks/summary.py). Import the file in Grafana, or mount it as infra/docker/compose.yaml does.
"""

import json
from pathlib import Path
from typing import Any

PANELS: list[tuple[str, list[tuple[str, str, list[tuple[str, str]]]]]] = [
    (
        "Is it learning?",
        [
            (
                "Reward",
                "short",
                [
                    ('gyre_reward_mean{run=~"$run"}', "training {{run}}"),
                    ('gyre_heldout_reward_mean{run=~"$run"}', "held-out {{run}}"),
                ],
            ),
            ("Optimizer step", "short", [('gyre_step{run=~"$run"}', "{{run}}")]),
            (
                "Loss and gradient norm",
                "short",
                [
                    ('gyre_train_loss{run=~"$run"}', "loss {{run}}"),
                    ('gyre_train_grad_norm{run=~"$run"}', "gradient norm {{run}}"),
                ],
            ),
            (
                "Sampler against trainer log-probs, largest difference",
                "short",
                [('gyre_train_sampler_trainer_max_abs{run=~"$run"}', "{{run}}")],
            ),
        ],
    ),
    (
        "Where does the time go?",
        [
            (
                "Seconds of a step",
                "s",
                [
                    ('gyre_rollout_duration_seconds{run=~"$run"}', "rollouts"),
                    ('gyre_train_duration_seconds{run=~"$run"}', "training"),
                    ('gyre_publish_duration_seconds{run=~"$run"}', "publication"),
                    ('gyre_step_duration_seconds{run=~"$run"}', "all of it"),
                ],
            ),
            ("Cells by state", "short", [('sum by (state) (gyre_cell_state{run=~"$run"})', "{{state}}")]),
            (
                "Micro-steps of the open step",
                "short",
                [
                    ('gyre_cell_step_pending{run=~"$run"}', "pending"),
                    ('gyre_cell_step_leased{run=~"$run"}', "leased"),
                    ('gyre_cell_step_completed{run=~"$run"}', "completed"),
                    ('gyre_cell_step_requeued{run=~"$run"}', "given to another cell"),
                ],
            ),
            ("Staleness", "short", [('gyre_train_staleness_max{run=~"$run"}', "oldest group trained")]),
        ],
    ),
    (
        "Rollouts",
        [
            (
                "Calls",
                "short",
                [
                    ('sum by (run) (gyre_proxy_in_flight{run=~"$run"})', "in flight {{run}}"),
                    ('sum by (run) (gyre_proxy_waiting{run=~"$run"})', "waiting for an engine {{run}}"),
                ],
            ),
            ("Sessions", "short", [('sum by (run) (gyre_proxy_open_sessions{run=~"$run"})', "open {{run}}")]),
            ("Engines: busy slots", "short", [('sum by (engine) (gyre_proxy_engine_busy{run=~"$run"})', "{{engine}}")]),
            (
                "Calls moved, tokens computed again",
                "short",
                [
                    ('sum(gyre_proxy_events{run=~"$run",event="calls_moved"})', "calls moved"),
                    ('sum(gyre_proxy_events{run=~"$run",event="tokens_recomputed"})', "tokens computed again"),
                ],
            ),
            (
                "Outcomes of the newest step",
                "short",
                [
                    (f'gyre_outcome_{name}{{run=~"$run"}}', name)
                    for name in (
                        "finished",
                        "time_limit",
                        "harness_failed",
                        "verifier_failed",
                        "no_artifact",
                        "cancelled",
                    )
                ],
            ),
            (
                "Dropped",
                "short",
                [
                    ('gyre_select_groups_dropped{run=~"$run"}', "groups"),
                    ('gyre_select_rollouts_dropped{run=~"$run"}', "rollouts"),
                ],
            ),
        ],
    ),
]


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana's JSON."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row, charts in PANELS:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": row,
                "collapsed": False,
                "panels": [],
                "gridPos": {"h": 1, "w": 24, "x": 0, "y": y},
            }
        )
        y += 1
        for index, (title, unit, queries) in enumerate(charts):
            place = {"h": 8, "w": 12, "x": 12 * (index % 2), "y": y + 8 * (index // 2)}
            panels.append(_chart(len(panels) + 1, title, unit, queries, place))
        y += 8 * -(-len(charts) // 2)
    return {
        "uid": "gyre",
        "title": "Gyre",
        "tags": ["gyre"],
        "schemaVersion": 39,
        "version": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [_runs(), _source()]},
        "panels": panels,
    }


def _chart(number: int, title: str, unit: str, queries: list[tuple[str, str]], place: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": title,
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": unit, "min": None}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": query, "legendFormat": legend}
            for index, (query, legend) in enumerate(queries)
        ],
    }


def _runs() -> dict[str, Any]:
    return {
        "name": "run",
        "type": "query",
        "label": "run",
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "query": "label_values(gyre_step, run)",
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "refresh": 2,
    }


def _source() -> dict[str, Any]:
    return {"name": "source", "type": "datasource", "label": "source", "query": "prometheus"}


def text() -> str:
    """The file's content."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("gyre.json").write_text(text(), encoding="utf-8")
