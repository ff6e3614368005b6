"""How the verbs reach Vertex AI: which backend, and which clock. Tests give their own."""

import dataclasses
from collections.abc import Callable

from deploy.vertex.api import Backend, open_backend
from deploy.vertex.retry import SYSTEM_CLOCK, Clock

BACKENDS = ("gcloud", "sdk")


@dataclasses.dataclass(frozen=True)
class Session:
    """Time and service; tests give their own."""

    clock: Clock
    open: Callable[[str, str, str], Backend]


SESSION = Session(SYSTEM_CLOCK, open_backend)
