import sys

from gyre_core.config.models import HarnessConfig
from gyre_core.rollout.harness import build_command


def test_command_placeholders_are_filled_once_and_other_braces_stay():
    config = HarnessConfig(
        command=("{python}", "-c", "print({1: 2})", "{instruction}", "--url={base_url}/v1"),
        env={"KEY": "{api_key}", "MODEL": "{model}", "PLAIN": "${HOME} {other}"},
    )
    command = build_command(
        config, base_url="http://h:1/s/x", api_key="secret", instruction="say {api_key} {python}", model="m"
    )
    assert command.argv == (
        sys.executable,
        "-c",
        "print({1: 2})",
        "say {api_key} {python}",
        "--url=http://h:1/s/x/v1",
    )
    assert command.env == {"KEY": "secret", "MODEL": "m", "PLAIN": "${HOME} {other}"}
