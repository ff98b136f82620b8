"""One Prefect API for all tests of flows and tasks."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def prefect_api() -> Iterator[None]:
    """A temporary server on a database of its own; about 10 s once a session."""
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=120):
        yield
