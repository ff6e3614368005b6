"""Leads to trainer.base.settings.train_config: files of users written for version 0.1 import it under this name."""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    return getattr(import_module("trainer.base.settings.train_config"), name)
