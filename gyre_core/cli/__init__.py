"""`gyre`: the command line. Each command is a module; heavy imports happen inside the command that needs them."""

from gyre_core.cli.main import main

__all__ = ["main"]
