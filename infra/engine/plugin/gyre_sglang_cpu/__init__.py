"""SGLang out-of-tree platform: plain torch on any CPU.

Two halves. `activate` names the platform class (SGLang's public plugin interface). `install_hooks` replaces a few
internals that assume CUDA; it is why exactly one SGLang version is accepted. SGLang loads both in each of its
processes, so this module imports nothing heavy by itself.
"""

import contextlib
import sys
from importlib import metadata

SUPPORTED_SGLANG = "0.5.23"  # the version whose internals hooks.py was written and tested against


def _check_version() -> None:
    """Stop the process unless SGLang is the supported version.

    SystemExit, because SGLang logs and swallows every `Exception` that a plugin raises and would then go on without
    the hooks.
    """
    found = metadata.version("sglang")
    if found != SUPPORTED_SGLANG:
        raise SystemExit(
            f"gyre-sglang-cpu: sglang {found} is installed, but this plugin replaces internals of sglang "
            f"{SUPPORTED_SGLANG} and works with no other version. Install it with `make engine`, or "
            f"`pip install --no-deps sglang=={SUPPORTED_SGLANG}` in the engine's environment."
        )


def _declare_torchvision_ops() -> None:
    """Let PyPI's torchvision import on a CPU torch.

    That wheel is linked to CUDA; its operator library does not load here, and its import then fails for want of two
    operator schemas. Declaring them is enough: nothing in a text server calls them.
    """
    import torch

    if torch.version.cuda is not None or "torchvision" in sys.modules:
        return
    for op in ("nms", "qnms"):
        with contextlib.suppress(RuntimeError):  # declared already by an earlier activation in this process
            torch.library.define(f"torchvision::{op}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def activate() -> str:
    """Entry point `sglang.srt.platforms`: the platform class's qualified name."""
    _check_version()
    _declare_torchvision_ops()
    return "gyre_sglang_cpu.platform.GyreCpuPlatform"


def install_hooks() -> None:
    """Entry point `sglang.srt.plugins`: runs once in every SGLang process."""
    _check_version()
    from gyre_sglang_cpu import hooks

    hooks.install()
