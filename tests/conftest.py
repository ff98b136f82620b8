"""Fixtures that any test may use. Real servers start once a session, and only when a test asks for them."""

from hypothesis import settings

from tests.support.seaweedfs import seaweedfs
from tests.support.sglang import sglang_server

__all__ = ["seaweedfs", "sglang_server"]

# No example may fail for being slow: machines that run tests are busy.
settings.register_profile("gyre", deadline=None)
settings.load_profile("gyre")
