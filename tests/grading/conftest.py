from tests.support.sandboxes import new_sandbox, sandbox, workspace

__all__ = ["new_sandbox", "sandbox", "workspace"]
