"""What each failure of Cloud Storage means: one line that says what to do."""

from collections.abc import Iterator
from contextlib import contextmanager

from trainer.errors import PlatformFault, UserError


class Cancelled(Exception):
    """A transfer that was given up because another one failed."""


@contextmanager
def explained(what: str, needed: str = "") -> Iterator[None]:
    """Turns what the SDK and the network raise into one line. `needed`: what the account must be allowed to do."""
    try:
        yield
    except (UserError, PlatformFault, Cancelled):
        raise
    except Exception as error:
        meant = _explain(error, what, needed)
        if meant is None:
            raise
        raise meant from error


def _explain(error: Exception, what: str, needed: str) -> Exception | None:
    from google.api_core import exceptions as api
    from google.auth import exceptions as auth
    from requests import RequestException
    from urllib3.exceptions import HTTPError

    cause = error.cause if isinstance(error, api.RetryError) else error
    text = " ".join(str(cause).split())
    first = text.partition(". ")[0][:160]
    if isinstance(error, (auth.DefaultCredentialsError, auth.RefreshError, api.Unauthorized)):
        return UserError(
            f"{what}: no valid Google credentials: run `gcloud auth application-default login`, or name a key file in "
            f"GOOGLE_APPLICATION_CREDENTIALS ({first})"
        )
    if "requester pays" in text.lower() or "userprojectmissing" in text.lower():
        return UserError(f"{what}: its bucket makes the reader pay (requester pays): copy what you need to your own")
    if isinstance(error, api.Forbidden):
        return UserError(f"{what}: no permission to {needed}: have it granted to the account that runs this")
    if isinstance(error, api.NotFound):
        if "bucket does not exist" in text.lower() or "/o/" not in text:
            return UserError(
                f"{what}: there is no such bucket: check its name, or make it (gcloud storage buckets create)"
            )
        return PlatformFault(f"{what}: gone, or replaced while it was read")
    if isinstance(error, api.ClientError) and not isinstance(error, api.TooManyRequests):
        return UserError(f"{what}: Cloud Storage refuses the request: {text[:300]}")
    if isinstance(
        error, (api.GoogleAPIError, auth.GoogleAuthError, RequestException, HTTPError, ConnectionError, TimeoutError)
    ):
        return PlatformFault(f"{what}: Cloud Storage does not answer as it should: {text[:300]}")
    if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
        return UserError(f"{what}: the local disk refuses it ({error.strerror}): see --cache_dir")
    return None
