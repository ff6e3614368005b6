"""Makes settings of the keyword-only parameters of the functions that a run names: fields of a subclass of TrainConfig.

`def build(config, dataset, *, depth: int = 2)` gives the flag --depth, the key `depth` of a recipe and of run.json, and
`config.depth`, whether the function is the user's or that of a built-in model. Whatever handles the fields of a
settings class handles these too.
"""

import dataclasses
import re
from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import Any, cast

from trainer.base.errors import UserError
from trainer.base.settings.fields import nearest
from trainer.base.settings.signatures import (
    REQUIRED,
    Parameter,
    Signature,
    Unreadable,
    read_signature,
    refuse_missing_module,
)
from trainer.base.settings.train_config import DATA_KINDS, MAY_CHANGE, MODELS, TrainConfig

FUNCTIONS = ("model", "data", "callbacks")  # settings that may name a function with settings
_FUNCTIONS = "functions"  # in the metadata of a field: those that take it


def is_dotted(value: str) -> bool:
    """Returns whether the value is a package.module:function, not a kind:path."""
    return re.fullmatch(r"[^\W\d][\w.]*:[^\W\d]\w*", value) is not None and value.split(":")[0] not in DATA_KINDS


@dataclasses.dataclass(frozen=True)
class OwnSettings:
    """Finds the settings of the functions that `named` names; `first`: a folder to search before Python's own.

    named: the values of the settings in FUNCTIONS; those that name no function are ignored.
    """

    named: Mapping[str, str]
    first: str = ""

    @cached_property
    def settings(self) -> type[TrainConfig]:
        """Returns TrainConfig with a field for each setting. Raises UserError if one of them is not possible."""
        taken: dict[str, tuple[Parameter, tuple[str, ...]]] = {}
        for function, signature in self._read[0].items():
            for parameter in signature.parameters:
                self._refuse_ours(function, parameter.name)
                first, functions = taken.get(parameter.name, (parameter, ()))
                if functions and str(parameter) != str(first):
                    raise UserError(
                        f"{self._shown(functions[0])} and {self._shown(function)} both have a setting {first.name}, as "
                        f"{first} and as {parameter}: give it one type and default, or two names"
                    )
                taken[parameter.name] = (first, (*functions, function))
        groups = tuple(" and ".join(map(self._shown, functions)) for _, functions in taken.values())
        return _subclass(tuple(taken.values()), groups)

    def hint(self, name: str) -> str:
        """Returns why the unknown flag `name` may not be a setting of the functions; empty if nothing is known."""
        signatures, unreadable = self._read
        for function, signature in signatures.items():
            if name in signature.positional:
                return (
                    f" ({self._shown(function)} takes {name}, but only keyword-only parameters are settings: write it "
                    "after a `*`)"
                )
        if unreadable:
            reasons = "; ".join(f"{self._shown(function)}: {why}" for function, why in unreadable.items())
            return f" (settings of your own functions are not known: {reasons})"
        models = [model for model, names in settings_of_models().items() if name in names]
        return f" ({name} is a setting of {', '.join(models)}, not of {self._shown('model')})" if models else ""

    def without_others(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the values without those that only other built-in models take, as those of a recipe may be."""
        names = {field.name for field in dataclasses.fields(self.settings)}
        others = {*values} - names and {name for names in settings_of_models().values() for name in names} - names
        return {name: value for name, value in values.items() if name not in others}

    @cached_property
    def _read(self) -> tuple[dict[str, Signature], dict[str, str]]:
        """Returns by function its signature or, of others, why it cannot be read."""
        signatures, unreadable = {}, {}
        for function in FUNCTIONS:
            name = self.named.get(function)
            path = _path_of_model(name) if function == "model" and isinstance(name, str) else name
            if isinstance(path, str) and is_dotted(path):
                try:
                    signatures[function] = read_signature(path, self._shown(function), self.first)
                except Unreadable as error:
                    unreadable[function] = str(error)
        return signatures, unreadable

    def _shown(self, function: str) -> str:
        return f"{function}={self.named[function]}"

    def _refuse_ours(self, function: str, name: str) -> None:
        ours = name.removeprefix("no_")
        if hasattr(TrainConfig, ours) or name in ("help", "print_config", "verbose"):
            raise UserError(
                f"{self._shown(function)}: its setting {name} has the name of a flag of the trainer: read "
                f"config.{ours}, or rename the parameter"
            )


def _path_of_model(name: str) -> str:
    """Returns the dotted path of a model's function. Raises UserError for the name of no model."""
    if ":" not in name and name not in MODELS:
        raise UserError(
            f"model={name}: no such model{nearest(name, MODELS)} Known: {', '.join(MODELS)}, or your own "
            "package.module:function"
        )
    return MODELS.get(name, name)


@lru_cache(maxsize=1)
def settings_of_models() -> dict[str, dict[str, Parameter]]:
    """Returns the settings of each built-in model by name."""
    signatures = {model: read_signature(path, f"model={model}") for model, path in MODELS.items()}
    return {model: {part.name: part for part in signature.parameters} for model, signature in signatures.items()}


@lru_cache(maxsize=64)
def _subclass(taken: tuple[tuple[Parameter, tuple[str, ...]], ...], groups: tuple[str, ...]) -> type[TrainConfig]:
    """Returns the settings class with these fields. It is the same for the same, so that configs can be compared."""
    if not taken:
        return TrainConfig
    fields = []
    for (parameter, functions), group in zip(taken, groups, strict=True):
        metadata = {**parameter.field.metadata, "group": f"settings of {group}", _FUNCTIONS: functions}
        field: Any = dataclasses.field(default=parameter.default, metadata=metadata)
        fields.append((parameter.name, parameter.field.type, field))
    settings = dataclasses.make_dataclass(
        "TrainConfig", fields, bases=(TrainConfig,), frozen=True, kw_only=True, namespace={"__module__": __name__}
    )
    return cast(type[TrainConfig], settings)


def refuse_missing_modules(config: TrainConfig) -> None:
    """Raises UserError, before TensorFlow is loaded, if a module that the settings name is not found here."""
    for setting in FUNCTIONS:
        path = getattr(config, setting)
        if is_dotted(path) or (":" in path and setting != "data"):
            refuse_missing_module(path.partition(":")[0], f"{setting}={path}")


def refuse_missing(settings: type[TrainConfig], values: Mapping[str, Any]) -> None:
    """Raises UserError if a setting without a default has no value in `values`."""
    for field in dataclasses.fields(settings):
        if field.default is REQUIRED and field.name not in values:
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
