"""The environment back end that a configuration names: a local sandbox, containers, or emulated rollouts.

Enters: the rollout section, and that of emulated runs. Leaves: something that runs commands (`SandboxRunner`). Raises
SandboxError when it does not work on this machine, before anything else starts.
"""

from collections.abc import Sequence
from pathlib import Path

from gyre_core.config.emulation import EmulationConfig
from gyre_core.config.models import RolloutConfig
from gyre_core.rollout.container import ContainerSandbox, ContainerSettings
from gyre_core.rollout.emulated import EmulatedEnvironment
from gyre_core.rollout.sandbox import Sandbox

Environment = Sandbox | ContainerSandbox | EmulatedEnvironment


def open_environment(
    rollout: RolloutConfig, *, hidden: Sequence[Path] = (), emulate: EmulationConfig | None = None
) -> Environment:
    """`hidden` are folders that nothing inside may see; a container sees none but those it is given."""
    if emulate is not None:
        return EmulatedEnvironment(emulate)
    if rollout.sandbox == "docker" or rollout.sandbox == "podman":
        container = rollout.container
        return ContainerSandbox(
            ContainerSettings(
                program=rollout.sandbox,
                image=container.image,
                network=container.network,
                memory_bytes=container.memory_bytes,
                cpus=container.cpus,
            )
        )
    return Sandbox(rollout.sandbox, hidden=hidden)
