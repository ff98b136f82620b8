"""What a run tells its proxies, and what it does with sessions that a killed process left."""

import logging
from pathlib import Path
from typing import Any

import pytest

from gyre_core.config import RunConfig
from gyre_core.errors import ConfigError, ProxyError
from gyre_core.proxy.journal import JournalFolder
from gyre_core.proxy.settings import SessionSettings
from gyre_core.run_folder import RunFolder
from gyre_core.types import RolloutSpec
from tasks.rollouts import execute_rollout
from tasks.runs import _clear_leftovers
from tasks.services import proxy_settings
from tests.support.runs import FakeFleet, make_context, small_config

TABLE = {"harness": "my-agent", "sub_agent": [{"header": "x-parent"}]}


def make_folder(config: RunConfig) -> RunFolder:
    return RunFolder.create(config, "r1")


def test_proxy_settings_each_process_has_its_own_secret_and_journal(tmp_path: Path) -> None:
    config = small_config(
        tmp_path, proxy__processes=2, proxy__journal_sync="session", proxy__keepalive_s=5.0, proxy__role_tables=[TABLE]
    )
    folder = make_folder(config)
    first, second = proxy_settings(config, folder)
    assert [path.name for path in (first.journal_dir, second.journal_dir) if path] == ["0", "1"]
    assert first.admin_secret != second.admin_secret
    assert first.journal_sync == "session" and first.keepalive_s == 5.0 and first.role_tables == (TABLE,)
    assert RunFolder.open(config.runs_dir, "r1").config().proxy == config.proxy, "a resumed run has the same"


def test_proxy_settings_bad_role_table_names_the_section_and_shows_no_secret(tmp_path: Path) -> None:
    config = small_config(tmp_path, proxy__role_tables=[{"harness": "x", "sub_agentz": []}])
    with pytest.raises(
        ConfigError, match=r"the section \[proxy\] cannot be used: role_tables: .*sub_agentz"
    ) as refusal:
        proxy_settings(config, make_folder(config))
    assert "admin_secret" not in str(refusal.value)


def test_resumed_run_drops_the_sessions_of_any_process_and_says_whose(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_folder(small_config(tmp_path))
    for index in range(3):  # the run goes on with another number of processes
        journals = JournalFolder(folder.journal / str(index))
        settings = SessionSettings(rollout_id=f"s0001-p{index}-00").model_dump(mode="json")
        journals.create(f"session-{index}", {"settings": settings}).close()
        journals.close()
    (folder.journal / "1" / "session-x.journal").write_bytes(b"torn")
    with caplog.at_level(logging.INFO):
        _clear_leftovers(folder)
        _clear_leftovers(folder)
    (message,) = [record.getMessage() for record in caplog.records if record.name == "tasks.runs"]
    assert message == (
        "dropped 4 proxy sessions of rollouts that had not finished, which start afresh: "
        "s0001-p0-00, s0001-p1-00, s0001-p2-00"
    )
    assert not list(folder.journal.iterdir())


def test_rollout_on_a_proxy_that_is_lost_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config(tmp_path)
    run = make_context(config, make_folder(config), FakeFleet(policy_version=0))

    async def execute(*_: Any, **__: Any) -> None:
        run.services.proxies.lose(0, "proxy ended too often")

    monkeypatch.setattr("tasks.rollouts.execute", execute)
    spec = RolloutSpec(rollout_id="a", group_id="g", problem_id="a", member=0, step=0, seed=1, dispatch_version=0)
    with pytest.raises(ProxyError, match="proxy ended too often"):
        execute_rollout.fn(run, spec)
