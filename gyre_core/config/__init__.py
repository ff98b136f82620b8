"""Typed configuration: one RunConfig from TOML, checked in full before anything starts, without torch or prefect."""

from gyre_core.config.load import load_run_config, parse_run_config
from gyre_core.config.models import (
    DataConfig,
    EngineConfig,
    EvaluateConfig,
    GradingConfig,
    HarnessConfig,
    ModelConfig,
    PrefectConfig,
    ProxyConfig,
    RolloutConfig,
    RunConfig,
    SchedulerConfig,
    SelectionConfig,
    StoreConfig,
    TrainConfig,
    TransferConfig,
)

__all__ = [
    "DataConfig",
    "EngineConfig",
    "EvaluateConfig",
    "GradingConfig",
    "HarnessConfig",
    "ModelConfig",
    "PrefectConfig",
    "ProxyConfig",
    "RolloutConfig",
    "RunConfig",
    "SchedulerConfig",
    "SelectionConfig",
    "StoreConfig",
    "TrainConfig",
    "TransferConfig",
    "load_run_config",
    "parse_run_config",
]
