"""Finds out which settings the functions of a run read, so that a setting that has no effect is refused.

A model that is compiled with "adam" has a learning rate of its own: without this, --learning_rate would be accepted,
written to run.json and ignored.
"""

from collections.abc import Collection
from typing import Any, cast

from trainer.base.errors import UserError
from trainer.base.settings.fields import as_text, fields_of
from trainer.base.settings.train_config import TrainConfig


def recording_reads(config: TrainConfig) -> tuple[TrainConfig, set[str]]:
    """Returns a copy of the config, and the names of the attributes that are read from the copy, as they are read."""
    names: set[str] = set()
    kind: Any = type(config)

    class Recording(kind):
        def __getattribute__(self, name: str) -> Any:
            names.add(name)
            return super().__getattribute__(name)

    copy: Any = object.__new__(Recording)
    vars(copy).update(vars(config))
    return cast(TrainConfig, copy), names


def refuse_unused(named: Collection[str], used: Collection[str], config: TrainConfig) -> None:
    """Raises UserError for a setting that a command or a call names and that nothing in the run has used."""
    for name, field in fields_of(type(config)).items():
        reason = field.metadata["used_by"]
        if reason and name in named and name not in used:
            value = as_text(getattr(config, name))
            raise UserError(f"{name}={value} has no effect, as {reason}; or drop --{name}")
