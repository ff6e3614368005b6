"""Makes settings of the keyword-only parameters of a user's functions: fields of a subclass of TrainConfig.

`def build(config, dataset, *, depth: int = 2)` gives the flag --depth, the key `depth` of a recipe and of run.json, and
`config.depth`. Whatever handles the fields of a settings class handles these too.
"""

import dataclasses
import re
from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import Any, cast

from trainer.base.errors import UserError
from trainer.base.settings.signatures import (
    REQUIRED,
    Parameter,
    Signature,
    Unreadable,
    read_signature,
    refuse_missing_module,
)
from trainer.base.settings.train_config import DATA_KINDS, MAY_CHANGE, TrainConfig

FUNCTIONS = ("model", "data", "callbacks")  # settings that may name a function of the user's
_FUNCTIONS = "functions"  # in the metadata of a field: those that take it


def is_dotted(value: str) -> bool:
    """Returns whether the value is a package.module:function, not a kind:path."""
    return re.fullmatch(r"[^\W\d][\w.]*:[^\W\d]\w*", value) is not None and value.split(":")[0] not in DATA_KINDS


@dataclasses.dataclass(frozen=True)
class OwnSettings:
    """Finds the settings of the functions that `named` names; `first`: a folder to search before Python's own.

    named: the values of the settings in FUNCTIONS; those that name no function of the user's are ignored.
    """

    named: Mapping[str, str]
    first: str = ""

    @cached_property
    def settings(self) -> type[TrainConfig]:
        """Returns TrainConfig with a field for each setting. Raises UserError if one of them is not possible."""
        taken: dict[Parameter, tuple[str, ...]] = {}
        for function, signature in self._signatures.items():
            for parameter in signature.parameters:
                self._refuse_ours(function, parameter)
                other = next((one for one in taken if one.name == parameter.name), parameter)
                self._refuse_two(parameter, function, other, taken.get(other, ()))
                taken[other] = (*taken.get(other, ()), function)
        groups = tuple(" and ".join(self._shown(one) for one in functions) for functions in taken.values())
        return _subclass(tuple(taken.items()), groups)

    def hint(self, name: str) -> str:
        """Returns why the unknown flag `name` may not be a setting of the functions; empty if nothing is known."""
        for function, signature in self._signatures.items():
            if name in signature.positional:
                return (
                    f" ({self._shown(function)} takes {name}, but only keyword-only parameters are settings: write it "
                    "after a `*`)"
                )
        reasons = "; ".join(f"{self._shown(function)}: {why}" for function, why in self._unreadable.items())
        return f" (settings of your own functions are not known: {reasons})" if reasons else ""

    @cached_property
    def _read(self) -> dict[str, Signature | str]:
        """Returns by function its signature, or why it cannot be read."""
        found: dict[str, Signature | str] = {}
        for function in FUNCTIONS:
            path = self.named.get(function)
            if isinstance(path, str) and is_dotted(path):
                try:
                    found[function] = read_signature(path, self._shown(function), self.first)
                except Unreadable as error:
                    found[function] = str(error)
        return found

    @property
    def _signatures(self) -> dict[str, Signature]:
        return {name: found for name, found in self._read.items() if isinstance(found, Signature)}

    @property
    def _unreadable(self) -> dict[str, str]:
        return {name: found for name, found in self._read.items() if isinstance(found, str)}

    def _shown(self, function: str) -> str:
        return f"{function}={self.named[function]}"

    def _refuse_ours(self, function: str, parameter: Parameter) -> None:
        name = parameter.name
        of_ours = next((one for one in (name, name.removeprefix("no_")) if hasattr(TrainConfig, one)), "")
        if of_ours:
            raise UserError(
                f"{self._shown(function)}: its setting {name} has the name of a setting of the trainer: read "
                f"config.{of_ours}, or rename the parameter"
            )
        if name in ("help", "print_config", "verbose"):
            raise UserError(f"{self._shown(function)}: its setting {name} has the name of a flag: rename the parameter")

    def _refuse_two(self, one: Parameter, function: str, other: Parameter, functions: tuple[str, ...]) -> None:
        if dataclasses.replace(one, meaning="") != dataclasses.replace(other, meaning=""):
            raise UserError(
                f"{self._shown(functions[0])} and {self._shown(function)} both have a setting {one.name}, as {other} "
                f"and as {one}: give it one type and default, or two names"
            )


@lru_cache(maxsize=64)
def _subclass(taken: tuple[tuple[Parameter, tuple[str, ...]], ...], groups: tuple[str, ...]) -> type[TrainConfig]:
    """Returns the settings class with these fields. It is the same for the same, so that configs can be compared."""
    if not taken:
        return TrainConfig
    fields = []
    for (parameter, functions), group in zip(taken, groups, strict=True):
        field = parameter.field
        more = {"group": f"settings of {group}", _FUNCTIONS: functions}
        made: Any = dataclasses.field(default=parameter.default, metadata={**field.metadata, **more})
        fields.append((parameter.name, field.type, made))
    made = dataclasses.make_dataclass(
        "TrainConfig", fields, bases=(TrainConfig,), frozen=True, kw_only=True, namespace={"__module__": __name__}
    )
    return cast(type[TrainConfig], made)


def refuse_missing_modules(config: TrainConfig) -> None:
    """Raises UserError, before TensorFlow is loaded, if a module that the settings name is not found here."""
    for setting in FUNCTIONS:
        path = getattr(config, setting)
        if is_dotted(path) or (":" in path and setting != "data"):
            refuse_missing_module(path.partition(":")[0], f"{setting}={path}")


def refuse_missing(settings: type[TrainConfig], given: Mapping[str, Any]) -> None:
    """Raises UserError if a setting without a default has no value in `given`."""
    for field in dataclasses.fields(settings):
        if field.default is REQUIRED and field.name not in given:
            raise UserError(f"{field.name} is missing, one of the {field.metadata['group']}: use --{field.name}=VALUE")


def taken_by(field: "dataclasses.Field[Any]") -> tuple[str, ...]:
    """Returns which of FUNCTIONS take a field as their setting; none for a setting of the trainer."""
    return tuple(field.metadata.get(_FUNCTIONS, ()))


def fixed_settings(config: TrainConfig) -> dict[str, Any]:
    """Returns the settings that a resumed run must share, by name.

    A setting that only functions take that may change, as callbacks, may change too.
    """
    may_change = {
        field.name for field in dataclasses.fields(config) if {*(taken_by(field) or (field.name,))} <= MAY_CHANGE
    }
    return {name: value for name, value in dataclasses.asdict(config).items() if name not in may_change}
