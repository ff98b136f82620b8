"""Fixtures that any test may use. Real servers start once a session, and only when a test asks for them."""

from tests.support.seaweedfs import seaweedfs
from tests.support.sglang import sglang_server

__all__ = ["seaweedfs", "sglang_server"]
