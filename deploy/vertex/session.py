"""Provides the clock and the backends that every command uses."""

import dataclasses
from collections.abc import Callable

from deploy.vertex.rest import Backend
from deploy.vertex.retry import SYSTEM_CLOCK, Clock

BACKENDS = ("gcloud", "sdk")


@dataclasses.dataclass(frozen=True)
class Session:
    """Holds the clock and the function that opens a backend; tests replace both."""

    clock: Clock
    open: Callable[[str, str, str], Backend]


def open_backend(kind: str, project: str, region: str) -> Backend:
    """Returns the backend `gcloud` or `sdk`; imports only that one."""
    if kind == "sdk":
        from deploy.vertex.sdk import Sdk

        return Sdk(project, region)
    from deploy.vertex.gcloud import Gcloud

    return Gcloud(project, region)


SESSION = Session(SYSTEM_CLOCK, open_backend)
