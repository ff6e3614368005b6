"""Leads to trainer.base.settings: files of users written for version 0.1 import it under this name."""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    if name != "TrainConfig":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("trainer.base.settings.train_config").TrainConfig
