"""From a harness's configuration to the command and environment of one rollout.

Enters: a HarnessConfig, the session's address and key, the instruction. Leaves: argv and environment. Invariant: each
placeholder is filled once, in one pass: braces inside an instruction stay what they are.
"""

import re
import sys
from dataclasses import dataclass

from gyre_core.config.models import HarnessConfig

MODEL_NAME = "gyre-policy"  # harnesses want a name; the proxy takes any
_PLACEHOLDER = re.compile(r"\{(python|base_url|api_key|model|instruction)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessCommand:
    """What the sandbox runs. Example: HarnessCommand(argv=("agent", "Do it."), env={"ANTHROPIC_API_KEY": "gyre-1"})"""

    argv: tuple[str, ...]
    env: dict[str, str]


def build_command(
    config: HarnessConfig, *, base_url: str, api_key: str, instruction: str, model: str = MODEL_NAME
) -> HarnessCommand:
    """Fill `{python}`, `{base_url}`, `{api_key}`, `{model}` and `{instruction}` in the command and the environment.

    `{python}` is the interpreter that runs Gyre, which the sandbox can see. Clients of OpenAI's form take
    `{base_url}/v1`, Anthropic's take `{base_url}`.
    """
    values = {
        "python": sys.executable,
        "base_url": base_url,
        "api_key": api_key,
        "model": model,
        "instruction": instruction,
    }

    def fill(text: str) -> str:
        return _PLACEHOLDER.sub(lambda match: values[match[1]], text)

    return HarnessCommand(
        argv=tuple(fill(part) for part in config.command),
        env={name: fill(value) for name, value in config.env.items()},
    )
