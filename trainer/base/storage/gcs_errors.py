"""Turns failures of Cloud Storage into one-line errors that state what to do."""

from collections.abc import Iterator
from contextlib import contextmanager

from trainer.base.errors import PlatformFault, UserError, shortened
from trainer.base.storage.login import login_command
from trainer.base.storage.transfers import Cancelled


class RefusedToken(UserError):
    """Reports credentials that Cloud Storage refuses: they may be valid again, as after a new login."""


class NoPermission(UserError):
    """Reports what the account of this machine may not do; that of a job may be permitted."""


class Conflict(PlatformFault):
    """Reports an object that is changed by others while it is replaced."""


def is_refused_token(error: BaseException | None) -> bool:
    """Returns whether a request failed because its token was refused, or could not be refreshed."""
    from google.api_core.exceptions import Unauthorized
    from google.auth.exceptions import InvalidOperation, RefreshError

    return isinstance(error, (Unauthorized, RefreshError, InvalidOperation))


@contextmanager
def explained(subject: str, needed: str = "") -> Iterator[None]:
    """Turns errors of the client and the network into one line. `needed`: what the account must be permitted to do."""
    try:
        yield
    except (UserError, PlatformFault, Cancelled):
        raise
    except Exception as error:
        explanation = _explain(error, subject, needed)
        if explanation is None:
            raise
        raise explanation from error


def _explain(error: Exception, subject: str, needed: str) -> Exception | None:
    from google.api_core import exceptions as api
    from google.auth import exceptions as auth
    from requests import RequestException
    from urllib3.exceptions import HTTPError

    cause = error.cause if isinstance(error, api.RetryError) else error
    text = " ".join(str(cause).split())
    refused = is_refused_token(cause)
    if refused or isinstance(cause, auth.DefaultCredentialsError):
        return (RefusedToken if refused else UserError)(
            f"{subject}: no valid Google credentials: run `{login_command()}`, or set "
            f"GOOGLE_APPLICATION_CREDENTIALS to a key file ({text.partition('. ')[0][:160]})"
        )
    if "requester pays" in text.lower() or "userprojectmissing" in text.lower():
        return UserError(f"{subject}: its bucket charges the reader (requester pays): copy the data to your own bucket")
    if isinstance(cause, api.Forbidden):
        return NoPermission(f"{subject}: no permission to {needed}: have it granted to the account that runs this")
    if isinstance(cause, api.NotFound):
        if "bucket does not exist" in text.lower() or "/o/" not in text:
            return UserError(
                f"{subject}: bucket not found: check its name, or create it (gcloud storage buckets create)"
            )
        return PlatformFault(f"{subject}: deleted or replaced while it was read")
    if isinstance(cause, api.ClientError) and cause is error:  # was not retried
        return UserError(f"{subject}: Cloud Storage rejected the request: {shortened(text)}")
    network = (api.GoogleAPIError, auth.GoogleAuthError, RequestException, HTTPError, ConnectionError, TimeoutError)
    if isinstance(error, network):
        return PlatformFault(f"{subject}: request to Cloud Storage failed: {shortened(text)}")
    if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
        return UserError(f"{subject}: cannot be stored on the local disk ({error.strerror}): see --cache_dir")
    return None
