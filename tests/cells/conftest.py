"""One real proxy process for the fleets of this folder's tests."""

from collections.abc import Iterator

import pytest

from gyre_core.proxy.pool import Shards
from gyre_core.proxy.settings import ProxySettings
from gyre_core.proxy.supervisor import ProxySupervisor
from tests.support.proxies import ADMIN_SECRET
from tests.support.tokenizer import save_model_folder


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shards]:
    folder = tmp_path_factory.mktemp("fleet-proxy")
    model_path = save_model_folder(tmp_path_factory.mktemp("fleet-model"))
    settings = ProxySettings(
        admin_secret=ADMIN_SECRET, model_path=model_path, context_length=4096, journal_dir=folder / "journal"
    )
    with ProxySupervisor([settings], work=folder / "work", logs=folder / "logs") as supervisor:
        supervisor.wait_ready()
        yield supervisor.shards
