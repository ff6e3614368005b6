"""Raises the exceptions of Google's Python clients as ApiError."""

import contextlib
from collections.abc import Iterator

from deploy.vertex import api
from deploy.vertex.api import ApiError
from trainer.storage.login import login_command


@contextlib.contextmanager
def converted_errors() -> Iterator[None]:
    """Raises Google's exceptions as ApiError."""
    from google.api_core.exceptions import GoogleAPICallError, RetryError
    from google.auth.exceptions import GoogleAuthError, TransportError
    from google.protobuf.json_format import ParseError
    from requests.exceptions import RequestException

    with api.unreadable_as_lost(ParseError):
        try:
            yield
        except GoogleAPICallError as error:
            raise ApiError(int(error.code or 0), str(error.message), login_command()) from None
        except (RequestException, RetryError, TransportError) as error:
            raise api.connection_error(f"{type(error).__name__}: {error}") from None
        except GoogleAuthError as error:
            raise ApiError(401, str(error), login_command()) from None
