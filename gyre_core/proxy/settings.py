"""What a proxy process and its sessions are told: pydantic, strict, importable without torch or a tokenizer."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from gyre_core.tracing.settings import TracingSettings
from gyre_core.trajectory.roles import role_table

LaxPath = Annotated[Path, Field(strict=False)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ProxySettings(_Section):
    """One proxy process.

    Example: ProxySettings(admin_secret="...", model_path=Path("policy"), context_length=4096, journal_dir=Path("j"))
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 0  # 0: any free port, printed on standard output
    admin_secret: Annotated[str, Field(min_length=16)]
    model_path: LaxPath  # folder with config.json and the tokenizer
    renderer: str = "auto"  # a name of the `renderers` library, or auto: by the model's config.json
    thinking_retention: Literal["all", "tool_cycle"] = "all"  # all: a new user turn keeps earlier reasoning's tokens
    context_length: Annotated[int, Field(gt=1)]
    journal_dir: LaxPath | None = None  # None: sessions are not restored after a restart
    journal_sync: Literal["call", "session"] = "call"  # fsync each finished call, or only at a session's begin and end
    engine_call_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    engine_attempts: Annotated[int, Field(ge=1)] = 8  # tries without progress before the harness is told to come back
    keepalive_s: Annotated[float, Field(gt=0, le=20)] = 15.0  # to the first sign of life, and between any two
    max_open_calls: Annotated[int, Field(gt=0)] = 4096  # requests at once; more are told to come back
    max_pending_bytes: Annotated[int, Field(gt=0)] = 2**30  # of the bodies of all open requests; likewise
    body_timeout_s: Annotated[float, Field(gt=0)] = 60.0  # to read a request's body
    max_body_bytes: Annotated[int, Field(gt=0)] = 16 * 2**20  # a history of a million tokens is 5 to 10 MB
    role_tables: tuple[dict[str, Any], ...] = Field(default=(), strict=False)  # asked before the built-in ones
    tracing: TracingSettings | None = None

    @property
    def name(self) -> str:
        """Of the process, for metrics and traces."""
        return f"proxy-{self.journal_dir.name}" if self.journal_dir is not None else "proxy"

    @field_validator("role_tables")
    @classmethod
    def _check_tables(cls, rows: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
        for row in rows:
            role_table(row)
        return rows


class SamplingSettings(_Section):
    """How a session samples; the session's temperature always wins over the harness's."""

    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    max_new_tokens: Annotated[int, Field(gt=0)] = 8192  # of one call, whatever the harness asks for
    seed: int | None = None  # None: the engine chooses


class LimitSettings(_Section):
    """Bounds of one session."""

    max_calls: Annotated[int, Field(gt=0)] = 1000
    max_tokens: Annotated[int, Field(gt=0)] = 1_000_000  # sampled
    max_time_s: Annotated[float, Field(gt=0)] = 86_400.0  # from the session's creation, restarts included
    max_in_flight: Annotated[int, Field(gt=0)] = 256  # calls at once; more are told to come back
    max_body_bytes: Annotated[int, Field(gt=0)] | None = None  # None: the proxy's


class HarnessName(_Section):
    """Which role table applies."""

    name: str = ""
    version: str = ""


class SessionSettings(_Section):
    """One rollout's session.

    Example: SessionSettings(rollout_id="s0003-p07-02", policy_version=3)
    """

    rollout_id: Annotated[str, Field(min_length=1, max_length=200)]
    policy_version: Annotated[int, Field(ge=0)] = 0  # at dispatch; spans carry the versions that really sampled
    sampling: SamplingSettings = SamplingSettings()
    limits: LimitSettings = LimitSettings()
    harness: HarnessName = HarnessName()
    on_change: Literal["keep", "fork"] = "keep"  # where a harness changed the meaning of what was sampled (decision 10)


class _Keyed(_Section):
    """Holds a key, which no error message may show."""

    model_config = ConfigDict(hide_input_in_errors=True)


class EngineEntry(_Keyed):
    """An engine that takes calls.

    Example: EngineEntry(url="http://127.0.0.1:30000", slots=16, api_key="...")
    """

    url: Annotated[str, Field(pattern=r"^http://[^\s/]+$")]
    slots: Annotated[int, Field(gt=0)]
    version: Annotated[int, Field(ge=0)] | None = None  # policy version that it serves; None: the update's
    rank: int = 0  # how long it stays: calls that must move prefer the highest
    # Until an aborted call's keys and values are where other engines find them: calls that leave it wait so long. With
    # SGLang's write-through to Mooncake 0.2 s never missed, 0 s missed once in two.
    kv_write_s: Annotated[float, Field(ge=0, le=10)] = 0.0
    api_key: Annotated[str | None, Field(pattern=r"^[!-~]+$", repr=False)] = None  # what calls to it must bring


class EnginesUpdate(_Keyed):
    """Which engines take calls from now on; none makes calls wait. A drained engine is back when it is listed."""

    engines: tuple[EngineEntry, ...] = Field(strict=False)
    policy_version: Annotated[int, Field(ge=0)]


class DrainRequest(_Section):
    """Move all calls off an engine.

    Example: DrainRequest(url="http://127.0.0.1:30000", timeout_s=0)
    """

    url: str
    timeout_s: Annotated[float, Field(ge=0, le=600)] = 30.0  # to wait for the calls to leave; they are told at once
    begin: bool = True  # False: only wait for a drain that was begun; an engine that is listed again has none
