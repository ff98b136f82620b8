"""Traces without servers: ids, what is sampled, files, a collector that is gone."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from opentelemetry import trace

from gyre_core.config.models import TracingConfig
from gyre_core.errors import StoreError
from gyre_core.tracing.read import StoredSpan, read_roots, read_trace
from gyre_core.tracing.settings import TracingSettings
from gyre_core.tracing.spans import NO_TRACING, Tracing, current_headers, root_context
from tests.support.collector import running_collector


def to_files(folder: Path, ratio: float = 1.0) -> TracingSettings:
    return TracingSettings(export="file", run="r1", folder=folder, sample_ratio=ratio)


def outline(spans: list[StoredSpan]) -> list[str]:
    return [f"{'  ' * depth}{span.name} [{span.process}]" for top in spans for depth, span in top.walk()]


def test_processes_that_never_met_write_one_tree(tmp_path: Path) -> None:
    with Tracing(to_files(tmp_path), "flow") as flow, Tracing(to_files(tmp_path), "proxy-0") as proxy:
        parent = proxy.rollout("a")
        with proxy.span("chat", {"gyre.call": "a-c0"}, parent=parent), proxy.span("engine.generate"):
            pass
        flow.record("grade", 105.0, 106.5, {"gyre.reward": 0.5}, parent=flow.rollout("a"))
        flow.record_rollout("a", 100.0, 106.5, {"gyre.rollout": "a", "gyre.calls": 3})
        flow.record_rollout("b", 100.0, 120.0, {"gyre.rollout": "b"})
    trees = read_trace(tmp_path, "r1", "rollout/a")
    assert outline(trees) == [
        "rollout [flow]",
        "  grade [flow]",
        "  chat [proxy-0]",
        "    engine.generate [proxy-0]",
    ]
    (root,) = trees
    assert (root.start_s, root.end_s, root.attributes["gyre.calls"]) == (100.0, 106.5, 3)
    assert root.children[0].attributes == {"gyre.reward": 0.5}
    assert root.children[1].attributes == {"gyre.call": "a-c0"}
    roots = [(span.attributes["gyre.rollout"], span.seconds) for span in read_roots(tmp_path, "rollout")]
    assert roots == [("b", 20.0), ("a", 6.5)]


def test_what_is_recorded_before_the_root_is_shown_without_it(tmp_path: Path) -> None:
    with Tracing(to_files(tmp_path), "flow") as flow:
        flow.record("harness", 1.0, 2.0, parent=flow.rollout("a"))
    assert outline(read_trace(tmp_path, "r1", "rollout/a")) == ["harness [flow]"]


def test_errors_are_marked_with_their_reason(tmp_path: Path) -> None:
    with Tracing(to_files(tmp_path), "flow") as flow:
        flow.record("harness", 1.0, 2.0, parent=flow.rollout("a"), error="its machine was lost")
        with pytest.raises(ValueError), flow.span("chat", parent=flow.rollout("a")):
            raise ValueError("a bad answer")
    spans = {span.name: span for span in read_trace(tmp_path, "r1", "rollout/a")}
    assert spans["harness"].error == "its machine was lost"
    assert "a bad answer" in spans["chat"].error


def test_ids_depend_on_run_and_subject_alone() -> None:
    one = root_context("r1", "rollout/a")
    assert one == root_context("r1", "rollout/a")
    others = [root_context("r2", "rollout/a"), root_context("r1", "rollout/b"), root_context("r1", "step/0")]
    assert len({(one.trace_id, one.span_id), *((o.trace_id, o.span_id) for o in others)}) == 4


def test_all_processes_sample_the_same_rollouts(tmp_path: Path) -> None:
    names = [f"s0000-p{number:03d}-00" for number in range(300)]
    found = {}
    for process in ("flow", "proxy-0"):
        with Tracing(to_files(tmp_path / process, 0.25), process) as tracing:
            for name in names:
                if process == "flow":
                    tracing.record_rollout(name, 1.0, 2.0, {"gyre.rollout": name})
                else:
                    with tracing.span("chat", {"gyre.rollout": name}, parent=tracing.rollout(name)):
                        pass
        folder = tmp_path / process
        found[process] = set()
        for name in names:
            try:
                found[process].add(read_trace(folder, "r1", f"rollout/{name}")[0].attributes["gyre.rollout"])
            except StoreError:
                continue
    assert found["flow"] == found["proxy-0"]
    assert 40 <= len(found["flow"]) <= 115  # 75 expected, 7.5 is one standard deviation


def test_headers_name_the_current_span(tmp_path: Path) -> None:
    assert current_headers() == {}
    with Tracing(to_files(tmp_path), "proxy-0") as proxy:
        with proxy.span("chat", parent=proxy.rollout("a")):
            own = trace.get_current_span().get_span_context()
            headers = current_headers()
        assert current_headers() == {}
    assert headers == {"traceparent": f"00-{root_context('r1', 'rollout/a').trace_id:032x}-{own.span_id:016x}-01"}


def test_a_collector_gets_the_spans(tmp_path: Path) -> None:
    with running_collector() as collector:
        settings = TracingSettings(export="otlp", endpoint=collector.url + "/", run="r1", folder=tmp_path)
        with Tracing(settings, "cell-3") as cell:
            cell.record("train.micro_step", 1.0, 2.0, parent=cell.rollout("a"))
        (span,) = collector.spans
    root = root_context("r1", "rollout/a")
    assert (span.service, span.name) == ("gyre-cell", "train.micro_step")
    assert (span.trace_id, span.parent_id) == (f"{root.trace_id:032x}", f"{root.span_id:016x}")
    assert not list(tmp_path.iterdir())


def test_a_collector_that_is_gone_holds_nobody(tmp_path: Path) -> None:
    settings = TracingSettings(export="otlp", endpoint="http://127.0.0.1:9", run="r1", folder=tmp_path)
    tracing = Tracing(settings, "flow")
    began = time.monotonic()
    for number in range(5000):
        tracing.record("harness", 1.0, 2.0, parent=tracing.rollout(str(number)))
    assert time.monotonic() - began < 10.0
    tracing.close()
    assert time.monotonic() - began < 20.0


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    tracing = Tracing(to_files(tmp_path / "file" / "traces"), "flow")
    assert not tracing.enabled
    tracing.record_rollout("a", 1.0, 2.0)


def test_a_torn_line_costs_only_itself(tmp_path: Path) -> None:
    with Tracing(to_files(tmp_path), "flow") as flow:
        flow.record_rollout("a", 1.0, 2.0)
    (path,) = tmp_path.glob("*.jsonl")
    with path.open("a") as file:
        file.write('{"resourceSpans": [{"reso')
    assert outline(read_trace(tmp_path, "r1", "rollout/a")) == ["rollout [flow]"]


def test_nothing_to_read_says_what_to_change(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r'tracing\.export = "file"'):
        read_roots(tmp_path, "rollout")
    with Tracing(to_files(tmp_path), "flow") as flow:
        flow.record_rollout("a", 1.0, 2.0)
    with pytest.raises(StoreError, match=r"tracing\.sample_ratio"):
        read_trace(tmp_path, "r1", "rollout/b")


def test_off_costs_no_import_and_no_span() -> None:
    assert TracingSettings.of(TracingConfig(), run="r1", run_folder=Path("r1")) is None
    assert NO_TRACING.rollout("a") is None
    with NO_TRACING.span("chat", {"a": 1}, parent=NO_TRACING.rollout("a")) as span:
        assert not span.is_recording()
        assert current_headers() == {}
    code = "import sys, gyre_core.proxy.server; print('opentelemetry.sdk' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
