"""Makes classes of options, and reads those that are written with a unit: times, as 30m."""

import dataclasses
import re
from typing import TypeVar, dataclass_transform

Options = TypeVar("Options")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def options_class(kind: type[Options]) -> type[Options]:
    """Makes a class whose fields are options a frozen dataclass of keywords."""
    return dataclasses.dataclass(frozen=True, kw_only=True)(kind)


class Seconds(float):
    """Represents a time in seconds; its text, as 7200s, is one that `seconds` reads."""

    def __str__(self) -> str:
        return f"{float(self):.10g}s"


def seconds(text: str) -> Seconds:
    """Returns the seconds in a time such as 2h, 30m or 1d. Raises ValueError with the rule."""
    match = re.fullmatch(r"(\d{1,8}(?:\.\d{1,3})?)([smhd])", text)
    value = float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]] if match else 0.0
    if not 1 <= value <= 30 * 86400:
        raise ValueError("must be a time of up to 30 days with its unit, as 30m, 2h or 1d")
    return Seconds(value)
