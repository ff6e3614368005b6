"""Translates failed calls and failed jobs into messages and exit codes."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager

from deploy.platform.api_error import ApiError, BrokenClientError, unreadable_as_lost
from deploy.platform.vertex_api import STOPPED, JobStatus
from deploy.tiers.gcp_config import GcpConfig
from trainer.base.errors import DONE, FAULT, INTERRUPTED, USER_MUST_CHANGE, PlatformFault, UserError
from trainer.base.storage.login import login_command

# The exit code if it is not known how a job ended, or whether it was created (EX_UNAVAILABLE of
# sysexits.h).
STATE_UNKNOWN = 69

# Exit status of a replica -> its explanation. A status of 128 + n means that signal n killed it.
_REPLICA_EXITS = {
    1: "a fault of the program or the platform: see its last log lines above",
    2: (
        "its settings, data or machine were refused, or a script's arguments: see the log line that"
        " contains error:"
    ),
    75: "interrupted with its state saved: submit it again with the same --job_dir to resume",
    134: "aborted (SIGABRT) in native code: see TensorFlow's last log lines above",
    137: (
        "killed (SIGKILL), most often out of memory: use a smaller batch or a machine with more"
        " memory"
    ),
    139: "crashed (SIGSEGV) in native code: use another image (deploy image --tensorflow=…)",
    143: "stopped from outside (SIGTERM) before it ended",
}


class VertexFault(PlatformFault):
    """Reports that one of Google's services fails; the message says what to do."""

    advice = ""


class JobUnknown(VertexFault):
    """Reports that a job runs, or may run, and that nothing watches it any longer, or its state
    cannot be read."""

    exit_code = STATE_UNKNOWN


@contextmanager
def api_errors(gcp: GcpConfig) -> Iterator[None]:
    """Converts an ApiError in the block to an error of one line: UserError if the user can fix it.

    Otherwise it is VertexFault.
    """
    try:
        yield
    except ApiError as error:
        raise (VertexFault if error.transient else UserError)(describe_error(error, gcp)) from None


@contextmanager
def billing_errors(action: str, fix: str) -> Iterator[None]:
    """Converts an ApiError of reading prices or bills to an error of one line that begins with
    `action`.

    It is UserError, with `fix`, if the user can do something about it, and VertexFault otherwise.
    """
    try:
        yield
    except ApiError as error:
        if not error.transient:
            raise UserError(
                f"{action}: {not_logged_in(error) if error.code == 401 else f'{error}: {fix}'}"
            ) from None
        raise VertexFault(f"{action}: {error}") from None


# A pattern in the message of a 403 -> what to do about it; docs/permissions.md lists all roles.
_PERMISSION_FIXES = {
    "has not been used in project|SERVICE_DISABLED": (
        "enable it: `gcloud services enable {service} --project={project}`"
    ),
    "VPC.?Service.?Controls|prohibited by organization's policy": (
        "a VPC Service Controls perimeter forbids it, no role is missing: run the command inside"
        " the perimeter, or give the identifier in the message to its administrator"
    ),
    r"logging\.": "request roles/logging.viewer on {project} (docs/permissions.md)",
    r"iam\.serviceAccounts\.|act as": (
        "request roles/iam.serviceAccountUser on the job's service account (docs/permissions.md)"
    ),
    "": (
        "request roles/aiplatform.user on {project}: `python -m deploy doctor` shows what else is"
        " missing"
    ),
}


def describe_error(error: ApiError, gcp: GcpConfig) -> str:
    """Returns one line with the service's message and what to do about it."""
    if error.final:
        return str(error)
    if error.quota:
        metric = re.search(r"[\w.]*googleapis\.com/\w+", str(error))
        return (
            f"no quota left in {gcp.region} for"
            f" {metric[0] if metric else 'aiplatform.googleapis.com'}: new projects often have 0:"
            " request more at"
            f" https://console.cloud.google.com/iam-admin/quotas?project={gcp.project} or use"
            " another region or tier (submit TIER TIER --region=A,B tries them in turn)"
        )
    if error.code == 401:
        return not_logged_in(error)
    if error.code in (400, 403) and re.search(r"billing", str(error), re.IGNORECASE):
        page = f"https://console.cloud.google.com/billing/linkedaccount?project={gcp.project}"
        return f"{error} ({error.code}): link the project to a billing account: {page}"
    host = re.search(r"[a-z]+\.googleapis\.com", str(error))
    service = host[0] if host else "aiplatform.googleapis.com"
    # Another error: what its code and message tell to do. The last of these expressions fits any.
    causes = (text for text in _PERMISSION_FIXES if re.search(text, str(error), re.IGNORECASE))
    permission = _PERMISSION_FIXES[next(causes)]
    fixes = {
        400: "the service rejected the job: change what the message names",
        403: permission.format(project=gcp.project, service=service),
        404: f"not found: check --project={gcp.project} and --region={gcp.region}",
    }
    default = "a retry does not help: change what it names"
    if error.transient:
        default = "the service fails: try again later"
    return f"{error} ({error.code or 'no response'}): {fixes.get(error.code, default)}"


def not_logged_in(error: ApiError) -> str:
    """Returns what to do after a 401.

    The service's own message, always the same long one, is left out.
    """
    return f"not logged in, or the login has expired (401): run `{error.login}`"


# Matches the service's error for a job for which there are no machines, or no quota.
_STOCKED_OUT = re.compile(
    r"stock-?out|resources are insufficient|insufficient"
    r" .*(capacity|resources)|quota|resource_exhausted",
    re.IGNORECASE,
)


def stocked_out(status: JobStatus) -> bool:
    """Returns whether the job never started because no machines, or no quota, were available."""
    # EXPIRED is the state of a job that waited too long for machines.
    failed = status.state == "FAILED" and _STOCKED_OUT.search(status.error)
    return not status.started and (status.state == "EXPIRED" or bool(failed))


def exit_code(status: JobStatus) -> int:
    """Returns the exit code that `watch` and `submit` end with for a job in a final state."""
    if status.state == "SUCCEEDED":
        return DONE
    if status.state in ("CANCELLED", STOPPED) or _replica_exit(status) == 75:
        return INTERRUPTED
    return USER_MUST_CHANGE if _replica_exit(status) == 2 else FAULT


def describe_failure(status: JobStatus) -> str:
    """Returns the job's error, with an explanation of its replica's exit status if there is one."""
    code = _replica_exit(status)
    if code not in _REPLICA_EXITS:
        return status.error
    return f"{status.error}: {code} means {_REPLICA_EXITS[code]}"


def _replica_exit(status: JobStatus) -> int:
    match = re.search(r"non-zero status of (\d+)", status.error)
    return int(match[1]) if match else 0


@contextmanager
def converted_errors() -> Iterator[None]:
    """Converts exceptions of Google's clients in the block, and of their HTTP client, to
    ApiError."""
    from google.api_core.exceptions import GoogleAPICallError, RetryError
    from google.auth.exceptions import GoogleAuthError, TransportError
    from google.protobuf.json_format import ParseError
    from requests.exceptions import RequestException

    with unreadable_as_lost(ParseError):
        try:
            yield
        except GoogleAPICallError as error:
            # the SDK names the URL
            message = re.sub(r"^[A-Z]+ https?://\S+: ", "", str(error.message))
            raise ApiError(int(error.code or 0), message, login_command()) from None
        except (RequestException, RetryError, TransportError) as error:
            raise connection_error(f"{type(error).__name__}: {error}") from None
        except GoogleAuthError as error:
            raise ApiError(401, str(error), login_command()) from None


def connection_error(text: str) -> ApiError:
    """Returns the error for a request without a response, by what its client, such as urllib3 or
    requests, wrote.

    A fault of TLS or of a proxy is a BrokenClientError, because a retry does not fix it.
    """
    _, caused_by, cause = text.strip().rpartition("Caused by ")
    cause = cause.removesuffix(")") if caused_by else cause
    if re.search(r"ProxyError(?!.*Tunnel connection failed: 50[234])|[Cc]onnect to proxy", text):
        line = f"no connection through the proxy ({cause}): check what HTTPS_PROXY names"
        return BrokenClientError(0, f"{line} (gcloud: `gcloud config list proxy`)", sent=False)
    if re.search(
        r"SSL(?!.*(EOF|timed out|SYSCALL|BAD_RECORD_MAC|reset))|certificate verify failed", text
    ):
        line = (
            f"no secure connection ({cause}): check this machine's clock, and its network's"
            " certificates"
        )
        fix = "REQUESTS_CA_BUNDLE=FILE; gcloud: `gcloud config set core/custom_ca_certs_file FILE`"
        return BrokenClientError(0, f"{line} ({fix})", sent=False)
    not_sent = (
        r"NewConnectionError|ConnectTimeout|NameResolutionError|Failed to resolve|Connection"
        r" refused"
    )
    return ApiError(0, cause, sent=not re.search(not_sent, text))


# https://cloud.google.com/apis/design/errors#error_model: google.rpc.Code -> HTTP status
_CODES = {
    "INVALID_ARGUMENT": 400,
    "FAILED_PRECONDITION": 400,
    "OUT_OF_RANGE": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "ABORTED": 409,
    "ALREADY_EXISTS": 409,
    "RESOURCE_EXHAUSTED": 429,
    "CANCELLED": 499,
    "UNKNOWN": 500,
    "INTERNAL": 500,
    "DATA_LOSS": 500,
    "UNIMPLEMENTED": 501,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
# text -> HTTP status
_PHRASES = {"auth login|active account": 401, "not have permission": 403, "not found": 404}


def gcloud_error(code: int, stderr: str) -> ApiError:
    """Converts gcloud's exit status `code` and what it wrote to stderr to an ApiError."""
    if code < 0:  # a signal killed it, and its output may be cut off
        return ApiError(0, f"gcloud was killed by signal {-code}, or did not end in time")
    message = stderr[stderr.rfind("ERROR:") :] if "ERROR:" in stderr else stderr[-500:]
    message = message.partition("\n\nIf you would like to report")[0]
    text = re.sub(r"^ERROR: (\(gcloud[\w.-]*\) )?", "", message.strip())
    # gcloud also prints "crashed" for network errors that it does not know, such as
    # (ConnectTimeout): transient.
    if re.match(
        r"gcloud failed to load|gcloud crashed"
        r" \((Attribute|Import|Key|ModuleNotFound|Name|Type)Error\)",
        text,
    ):
        fix = "reinstall it (https://cloud.google.com/sdk/docs/install), or use --backend=sdk"
        return BrokenClientError(0, f"{text.splitlines()[0]}: {fix}")
    # The status: by the name of its code, by its number, or by a phrase.
    name = re.match(r"([A-Z_]+):", text)
    if name and name[1] in _CODES:
        return ApiError(_CODES[name[1]], text)
    rejected = (
        r"Invalid (value|choice)|argument |unrecognized argument|Missing required|must be specified"
    )
    # gcloud itself rejected an argument, and sent nothing
    if code == 2 or re.match(rejected, text):
        return ApiError(400, text)
    number = re.search(r"\b(?:HTTPError|Error|status:?) (\d{3})\b", text)
    if number:
        return ApiError(int(number[1]), text)
    for phrase, status in _PHRASES.items():
        if re.search(phrase, text):
            return ApiError(status, text)
    return connection_error(text or f"gcloud exited with status {code} and no message")


def lost_response(log: str) -> ApiError:
    """Returns the error that made gcloud retry.

    `log`: its log from the line that announces the retry.

    The response that the log contains may have several lines.
    """
    reason = log.rsplit("after exception ", 1)[-1].strip()
    status = re.search(r"'status': '?(\d{3})", reason)
    if not status:
        return connection_error(reason.partition("\n")[0])
    message = re.search(r'"message": ("(?:[^"\\]|\\.)*")', reason)
    return ApiError(
        int(status[1]),
        json.loads(message[1], strict=False) if message else "the service gave no reason",
    )
