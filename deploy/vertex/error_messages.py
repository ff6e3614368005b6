"""Reads failures of Vertex AI from Python clients, from HTTP responses and from what gcloud prints, as ApiError."""

import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any

from deploy.vertex.api import ApiError, BrokenClientError, unreadable_as_lost
from trainer.base.storage.login import login_command


@contextlib.contextmanager
def converted_errors() -> Iterator[None]:
    """Raises Google's exceptions as ApiError."""
    from google.api_core.exceptions import GoogleAPICallError, RetryError
    from google.auth.exceptions import GoogleAuthError, TransportError
    from google.protobuf.json_format import ParseError
    from requests.exceptions import RequestException

    with unreadable_as_lost(ParseError):
        try:
            yield
        except GoogleAPICallError as error:
            message = re.sub(r"^[A-Z]+ https?://\S+: ", "", str(error.message))  # the SDK names the URL
            raise ApiError(int(error.code or 0), message, login_command()) from None
        except (RequestException, RetryError, TransportError) as error:
            raise connection_error(f"{type(error).__name__}: {error}") from None
        except GoogleAuthError as error:
            raise ApiError(401, str(error), login_command()) from None


def response_error(response: Any) -> ApiError:
    """Converts an HTTP response with a status of 400 or more."""
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = response.text or response.reason
    return ApiError(response.status_code, message, login_command())


# What HTTP clients (urllib3, requests) write of a request that did not reach the service.
_TLS = re.compile(r"SSL(?!.*(EOF|timed out|SYSCALL|BAD_RECORD_MAC|reset))|certificate verify failed")
_PROXY = re.compile(r"ProxyError(?!.*Tunnel connection failed: 50[234])|[Cc]onnect to proxy")
_NOT_SENT = re.compile(r"NewConnectionError|ConnectTimeout|NameResolutionError|Failed to resolve|Connection refused")


def connection_error(text: str) -> ApiError:
    """Returns the error for a request without a response; neither TLS nor a proxy is fixed by a retry."""
    _, caused_by, cause = text.strip().rpartition("Caused by ")
    cause = cause.removesuffix(")") if caused_by else cause
    if _PROXY.search(text):
        line = f"no connection through the proxy ({cause}): check what HTTPS_PROXY names"
        return BrokenClientError(0, f"{line} (gcloud: `gcloud config list proxy`)", sent=False)
    if _TLS.search(text):
        line = f"no secure connection ({cause}): check this machine's clock, and its network's certificates"
        fix = "REQUESTS_CA_BUNDLE=FILE; gcloud: `gcloud config set core/custom_ca_certs_file FILE`"
        return BrokenClientError(0, f"{line} ({fix})", sent=False)
    return ApiError(0, cause, sent=not _NOT_SENT.search(text))


# https://cloud.google.com/apis/design/errors#error_model: google.rpc.Code -> HTTP status
_CODES = {
    "INVALID_ARGUMENT": 400, "FAILED_PRECONDITION": 400, "OUT_OF_RANGE": 400, "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403, "NOT_FOUND": 404, "ABORTED": 409, "ALREADY_EXISTS": 409, "RESOURCE_EXHAUSTED": 429,
    "CANCELLED": 499, "UNKNOWN": 500, "INTERNAL": 500, "DATA_LOSS": 500, "UNIMPLEMENTED": 501, "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}  # fmt: skip
_PHRASES = {"auth login|active account": 401, "not have permission": 403, "not found": 404}
# gcloud also prints "crashed" for network errors that it does not know, as (ConnectTimeout): those are transient.
_BROKEN = re.compile(r"gcloud failed to load|gcloud crashed \((Attribute|Import|Key|ModuleNotFound|Name|Type)Error\)")
_REFUSED = re.compile(r"Invalid (value|choice)|argument |unrecognized argument|Missing required|must be specified")


def gcloud_error(code: int, stderr: str) -> ApiError:
    """Converts gcloud's exit status and last output to an ApiError."""
    if code < 0:  # its output may be cut off
        return ApiError(0, f"gcloud was killed by signal {-code}, or did not end in time")
    message = stderr[stderr.rfind("ERROR:") :] if "ERROR:" in stderr else stderr[-500:]
    message = message.partition("\n\nIf you would like to report")[0]
    text = re.sub(r"^ERROR: (\(gcloud[\w.-]*\) )?", "", message.strip())
    if _BROKEN.match(text):
        fix = "reinstall it (https://cloud.google.com/sdk/docs/install), or use --backend=sdk"
        return BrokenClientError(0, f"{text.splitlines()[0]}: {fix}")
    name = re.match(r"([A-Z_]+):", text)
    if name and name[1] in _CODES:
        return ApiError(_CODES[name[1]], text)
    if code == 2 or _REFUSED.match(text):  # gcloud rejects an argument itself
        return ApiError(400, text)
    number = re.search(r"\b(?:HTTPError|Error|status:?) (\d{3})\b", text)
    if number:
        return ApiError(int(number[1]), text)
    for phrase, status in _PHRASES.items():
        if re.search(phrase, text):
            return ApiError(status, text)
    return connection_error(text or f"gcloud exited with status {code} and no message")


def lost_response(log: str) -> ApiError:
    """Returns the error in gcloud's log, from the line on that announces a retry; the response may have many lines."""
    reason = log.rsplit("after exception ", 1)[-1].strip()
    status = re.search(r"'status': '?(\d{3})", reason)
    if not status:
        return connection_error(reason.partition("\n")[0])
    message = re.search(r'"message": ("(?:[^"\\]|\\.)*")', reason)
    return ApiError(int(status[1]), json.loads(message[1], strict=False) if message else "the service gave no reason")
