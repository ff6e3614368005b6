"""Reads the settings that a study varies, and checks before any trial that no run would refuse a value of them."""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer.base.errors import UserError
from trainer.base.settings.fields import as_text, coerce, nearest, value_type
from trainer.base.settings.resolution import Overrides

TrialSettings = dict[str, Any]  # of one trial, by name

_FORM = "write --tune=NAME=LOW..HIGH, LOW..HIGH:log or A,B,C, as learning_rate=1e-5..1e-3:log or width=16,32,64"
_MOST_VALUES = 64  # of a range of whole numbers that are checked one by one
_MOST_CORNERS = 256  # combinations that are checked

# Settings that a study does not vary -> what to do instead.
_NOT_VARIED = {
    "recipe": "a study varies the settings of one recipe: use one study for each",
    "job_dir": "--out names the folder of the study",
    "seed": "use --repeats=COUNT for runs with other seeds",
    "data": "scores on different data cannot be compared: use one study for each",
    "callbacks": "vary a setting that your function takes",
    "tuning_metric": "--metric names it",
    "expect_devices": "the tier sets the number of devices",
    "replicas": "the tier sets the number of devices",
}


@dataclasses.dataclass(frozen=True)
class StudyParameter:
    """Describes a setting that a study varies: one of `values`, or from `low` to `high`, both included."""

    name: str
    kind: type  # int, float, bool or str
    values: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False  # equal ratios are equally likely, not equal differences

    @property
    def count(self) -> float:
        """Returns the number of possible values; infinity for a range of fractions."""
        if self.values:
            return len(self.values)
        return self.high - self.low + 1 if self.kind is int else math.inf

    @property
    def text(self) -> str:
        """Returns the parameter as --tune takes it."""
        if self.values:
            return f"{self.name}={','.join(map(as_text, self.values))}"
        return f"{self.name}={as_text(self.low)}..{as_text(self.high)}{':log' if self.log else ''}"

    def contains(self, value: Any) -> bool:
        """Returns whether `value`, of the parameter's kind, is one of the possible values."""
        return value in self.values if self.values else bool(self.low <= value <= self.high)

    def samples(self) -> list[Any]:
        """Returns values to check: all, or both ends and some between; the first and last are the ends."""
        if self.values or self.kind is float:
            return [*self.values] or [self.low, self.high]
        step = (self.high - self.low) / (_MOST_VALUES - 1)
        return sorted({round(self.low + index * step) for index in range(_MOST_VALUES)})


def read_space(texts: Sequence[str], overrides: Overrides) -> list[StudyParameter]:
    """Returns the parameters of the flags --tune. Raises UserError for an unknown setting or a value that it lacks."""
    if not texts:
        raise UserError(f"tune is missing: it names a setting and its values: {_FORM}")
    space: dict[str, StudyParameter] = {}
    for text in texts:
        parameter = _parameter(text, overrides)
        name = parameter.name
        if name in space:
            raise UserError(f"tune={text}: {name} is varied twice: put all its values into one --tune")
        if name in overrides.values:
            flag = f"--{name}={as_text(overrides.values[name])}"
            raise UserError(f"{flag} and --tune={text} contradict each other: drop one of them")
        space[name] = parameter
    return list(space.values())


def _parameter(text: str, overrides: Overrides) -> StudyParameter:
    name, _, choices = (part.strip() for part in text.partition("="))
    name = name.removeprefix("--").replace("-", "_")
    if not name or not choices:
        raise UserError(f"tune={text}: {_FORM}")
    fields = {field.name: field for field in dataclasses.fields(overrides.own.settings)}
    if name not in fields:
        raise UserError(f"tune={text}: unknown setting '{name}'{nearest(name, fields)}{overrides.own.hint(name)}")
    if name in _NOT_VARIED:
        raise UserError(f"tune={text}: a study does not vary {name}: {_NOT_VARIED[name]}")
    field, (kind, _) = fields[name], value_type(fields[name])
    span = re.fullmatch(r"(.+?)\.\.(.+?)(:log)?", choices)
    try:
        if span and kind in (int, float):
            low, high = coerce(field, span[1]), coerce(field, span[2])
            if None in (low, high) or not low < high:
                raise UserError(f"{low} is not below {high}: {_FORM}")
            if span[3] and low <= 0:
                raise UserError(f"a logarithmic range begins above 0, not at {as_text(low)}")
            return StudyParameter(name, kind, (), low, high, bool(span[3]))
        values = tuple(coerce(field, value.strip()) for value in choices.split(","))
    except UserError as error:
        raise UserError(f"tune={text}: {error}") from None
    if len(set(values)) < max(2, len(values)):
        raise UserError(f"tune={text}: give two values or more, each once, or leave {name} out of --tune")
    return StudyParameter(name, kind, values)


def check_space(space: Sequence[StudyParameter], resolve: Callable[[TrialSettings], Any]) -> None:
    """Raises UserError if `resolve`, which a trial calls with its settings, refuses some of them.

    Each parameter is checked at all its values (of a range, both ends and some between), then all at their ends.
    """
    values = {parameter.name: parameter.samples() for parameter in space}
    first = {name: samples[0] for name, samples in values.items()}
    alone = ({**first, name: value} for name, samples in values.items() for value in samples)
    ends = itertools.product(*((samples[0], samples[-1]) for samples in values.values()))
    corners = (dict(zip(values, corner, strict=True)) for corner in itertools.islice(ends, _MOST_CORNERS))
    for settings in itertools.chain(alone, corners):
        try:
            resolve(settings)
        except UserError as error:
            raise UserError(
                f"a trial with {shown(settings)} would be refused: {error}; leave these values out of --tune"
            ) from None


def configurations(space: Sequence[StudyParameter]) -> float:
    """Returns how many different trials there can be; may be infinity."""
    return math.prod(parameter.count for parameter in space)


def of_recipe(space: Sequence[StudyParameter], overrides: Overrides) -> TrialSettings | None:
    """Returns the settings that a run without a study would have; None if they are not all in the space."""
    fields = {field.name: field.default for field in dataclasses.fields(overrides.own.settings)}
    usual = {parameter.name: overrides.recipe.get(parameter.name, fields[parameter.name]) for parameter in space}
    inside = all(type(usual[limits.name]) is limits.kind and limits.contains(usual[limits.name]) for limits in space)
    return usual if inside else None


def shown(settings: Mapping[str, Any]) -> str:
    """Returns the settings as flags without dashes: `learning_rate=0.001, width=32`."""
    return ", ".join(f"{name}={as_text(value)}" for name, value in settings.items())
