"""Provides the clock and the backends that every command uses."""

import dataclasses
from collections.abc import Callable

from deploy.vertex.api import Backend, open_backend
from deploy.vertex.retry import SYSTEM_CLOCK, Clock

BACKENDS = ("gcloud", "sdk")


@dataclasses.dataclass(frozen=True)
class Session:
    """Holds the clock and the function that opens a backend; tests replace both."""

    clock: Clock
    open: Callable[[str, str, str], Backend]


SESSION = Session(SYSTEM_CLOCK, open_backend)
