"""Fixtures that any test may use. Real servers start once a session, and only when a test asks for them."""

from tests.support.sglang import sglang_server

__all__ = ["sglang_server"]
