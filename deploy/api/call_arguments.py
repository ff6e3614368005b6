"""Turns the values of a Python call into the arguments of a verb, so that both are parsed, and refused, alike."""

from collections.abc import Mapping, Sequence
from os import PathLike

from deploy.api.arguments import check_arguments
from trainer.base.errors import UserError
from trainer.base.settings.fields import as_text

FlagValue = str | PathLike[str] | int | float | bool | None | Sequence[str] | Mapping[str, str | int | float]
_JOINED = ("region", "regions", "labels")  # several values of these are one text, with commas


def as_arguments(
    positional: Sequence[str], flags: Mapping[str, FlagValue], settings: Mapping[str, FlagValue] | None = None
) -> list[str]:
    """Returns ["l4x1", "--steps=5"] for ("l4x1",), {"spot": None} and {"steps": 5}.

    Of `flags` what is empty is left out; a name that Python reserves ends with _, as from_. Of `settings` None is
    "none", which replaces a recipe's value; an empty text is refused, as in a command. A list stands for several values
    of one flag, a dictionary for several of the form NAME=VALUE. Raises UserError for a flag that is no keyword, and
    for dry_run.
    """
    settings, arguments = settings or {}, {name.removesuffix("_"): value for name, value in flags.items()}
    words = [*map(str, positional)]
    for word in words:
        if word.startswith("-"):
            raise UserError(f"{word}: flags of a function are keywords, as steps=100")
    if settings.get("dry_run") or arguments.get("dry_run"):
        raise UserError("dry_run is of the command, which prints: python -m deploy VERB … --dry_run --json")
    for name, value in arguments.items():
        texts = _texts(value)
        texts = [",".join(texts)] if name in _JOINED else texts
        words += [f"--{name}={text}" for text in texts if value is not None and text]
    words += [f"--{name}={text}" for name, value in settings.items() for text in _texts(value)]
    check_arguments(words)
    return words


def _texts(value: FlagValue) -> list[str]:
    if isinstance(value, Mapping):
        return [f"{key}={part}" for key, part in value.items()]
    return [*map(as_text, value if isinstance(value, (list, tuple)) else (value,))]
