"""Provides the clock and the backends that every command uses."""

import contextlib
import dataclasses
from collections.abc import Callable

from deploy.tiers.output import tell
from deploy.vertex.rest import Backend
from deploy.vertex.retry import SYSTEM_CLOCK, Clock
from trainer.base.storage.login import two_accounts

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


def tell_accounts(kind: str) -> None:
    """Prints both accounts if jobs are submitted as another one than buckets are read and written as."""
    from google.auth.exceptions import GoogleAuthError

    with contextlib.suppress(GoogleAuthError):  # the first request says it
        if kind != "sdk" and (found := two_accounts()):
            tell(
                f"two logins: jobs are created as {found[0]} (gcloud), and watched, with their buckets, as {found[1]} "
                "(application default credentials)"
            )


SESSION = Session(SYSTEM_CLOCK, open_backend)
