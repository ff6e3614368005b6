"""Turns the values of a Python call into the arguments of a verb, so that both are parsed, and refused, alike."""

from collections.abc import Mapping, Sequence

from deploy.client.arguments import check_arguments
from trainer.base.settings.fields import as_text

FlagValue = str | int | float | bool | None | Sequence[str] | Mapping[str, str | int | float]
_JOINED = ("region", "regions", "labels")  # several values of these are one text, with commas


def as_arguments(positional: Sequence[str], flags: Mapping[str, FlagValue]) -> list[str]:
    """Returns ["l4x1", "--steps=5"] of ("l4x1",) and {"steps": 5, "spot": None, "data": ""}: what is empty is left out.

    A list stands for several values of one flag, a dictionary for several of the form NAME=VALUE.
    """
    words = [*positional]
    for name, value in flags.items():
        values = [value] if isinstance(value, (str, int, float)) or value is None else value
        texts = [f"{key}={values[key]}" for key in values] if isinstance(values, Mapping) else [*map(as_text, values)]
        texts = [",".join(texts)] if name in _JOINED else texts
        words += [f"--{name}={text}" for text in texts if value is not None and text]
    check_arguments(words)
    return words
