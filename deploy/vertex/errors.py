"""Translates failed calls and failed jobs into messages and exit codes."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from deploy.tiers.gcp_config import GcpConfig
from deploy.vertex.api import STOCKED_OUT, STOPPED, ApiError, JobStatus
from trainer.base.errors import DONE, FAULT, INTERRUPTED, USER_MUST_CHANGE, PlatformFault, UserError

STATE_UNKNOWN = 69  # exit code: the job's end, or whether it was created, is unknown (EX_UNAVAILABLE of sysexits.h)

# Exit status of a replica -> explanation. 128 + n: killed by signal n.
_REPLICA_EXITS = {
    1: "a fault of the program or the platform: see its last log lines above",
    2: "its settings, data or machine were refused, or a script's arguments: see the log line that contains error:",
    75: "interrupted with its state saved: submit it again with the same --job_dir to resume",
    134: "aborted (SIGABRT) in native code: see TensorFlow's last log lines above",
    137: "killed (SIGKILL), most often out of memory: use a smaller batch or a machine with more memory",
    139: "crashed (SIGSEGV) in native code: use another image (deploy image --tensorflow=…)",
    143: "stopped from outside (SIGTERM) before it ended",
}


class StateUnknownError(ApiError):
    """Reports that a job runs or may run and its state cannot be read now; `code` is that of the cause."""

    final = True


class VertexFault(PlatformFault):
    """Reports that a service of Google's fails; its line says what to do."""

    advice = ""


class JobUnknown(VertexFault):
    """Reports that a job runs or may run, unobserved."""

    exit_code = STATE_UNKNOWN


@contextmanager
def api_errors(gcp: GcpConfig) -> Iterator[None]:
    """Raises an ApiError as one line: UserError if the user can fix it, else VertexFault or JobUnknown."""
    try:
        yield
    except StateUnknownError as error:
        raise JobUnknown(str(error)) from None
    except ApiError as error:
        raise (VertexFault if error.transient else UserError)(describe_error(error, gcp)) from None


@contextmanager
def billing_errors(action: str, fix: str) -> Iterator[None]:
    """Raises an ApiError of prices or of a bill as one line: UserError with `fix` if the user can do something."""
    try:
        yield
    except ApiError as error:
        if not error.transient:
            raise UserError(f"{action}: {not_logged_in(error) if error.code == 401 else f'{error}: {fix}'}") from None
        raise VertexFault(f"{action}: {error}") from None


def describe_error(error: ApiError, gcp: GcpConfig) -> str:
    """Returns one line: the service's message and what to do."""
    if error.final:
        return str(error)
    if error.quota:
        metric = re.search(r"[\w.]*googleapis\.com/\w+", str(error))
        return (
            f"no quota left in {gcp.region} for {metric[0] if metric else 'aiplatform.googleapis.com'}: new projects "
            "often have 0: request more at https://console.cloud.google.com/iam-admin/quotas?project="
            f"{gcp.project} or use another region or tier (submit TIER TIER --region=A,B tries them in turn)"
        )
    if error.code == 401:
        return not_logged_in(error)
    if error.code in (400, 403) and re.search(r"billing", str(error), re.IGNORECASE):
        page = f"https://console.cloud.google.com/billing/linkedaccount?project={gcp.project}"
        return f"{error} ({error.code}): link the project to a billing account: {page}"
    fixes = {
        400: "the service rejected the job: change what the message names",
        403: _permission_fix(str(error), gcp),
        404: f"not found: check --project={gcp.project} and --region={gcp.region}",
    }
    default = "the service fails: try again later" if error.transient else "a retry does not help: change what it names"
    return f"{error} ({error.code or 'no response'}): {fixes.get(error.code, default)}"


def not_logged_in(error: ApiError) -> str:
    """Returns what to do after a 401, whose message is long and always the same."""
    return f"not logged in, or the login has expired (401): run `{error.login}`"


# Pattern of a permission in a 403 -> the role that grants it; docs/permissions.md lists them all.
_ROLES = {
    r"logging\.": "roles/logging.viewer on {project}",
    r"iam\.serviceAccounts\.|act as": "roles/iam.serviceAccountUser on the job's service account",
    "": "roles/aiplatform.user on {project}",
}


def _permission_fix(message: str, gcp: GcpConfig) -> str:
    if "has not been used in project" in message or "SERVICE_DISABLED" in message:
        host = re.search(r"[a-z]+\.googleapis\.com", message)
        name = host[0] if host else "aiplatform.googleapis.com"
        return f"enable it: `gcloud services enable {name} --project={gcp.project}`"
    if re.search(r"VPC.?Service.?Controls|prohibited by organization's policy", message, re.IGNORECASE):
        return (
            "a VPC Service Controls perimeter forbids it, no role is missing: run the command inside the perimeter, or "
            "give the identifier in the message to its administrator"
        )
    role = next(role for pattern, role in _ROLES.items() if re.search(pattern, message))
    return f"request {role.format(project=gcp.project)} (docs/permissions.md)"


def stocked_out(status: JobStatus) -> bool:
    """Returns whether the job failed because no machines, or no quota, were available."""
    # A job that waited for machines for too long is EXPIRED.
    return status.state == "EXPIRED" or (status.state == "FAILED" and bool(STOCKED_OUT.search(status.error)))


def exit_code(status: JobStatus) -> int:
    """Returns the exit code of `watch` and `submit` for a job that is over."""
    if status.state == "SUCCEEDED":
        return DONE
    if status.state in ("CANCELLED", STOPPED) or _replica_exit(status) == 75:
        return INTERRUPTED
    return USER_MUST_CHANGE if _replica_exit(status) == 2 else FAULT


def describe_failure(status: JobStatus) -> str:
    """Returns the job's error, with its replica's exit status explained."""
    code = _replica_exit(status)
    return f"{status.error}: {code} means {_REPLICA_EXITS[code]}" if code in _REPLICA_EXITS else status.error


def _replica_exit(status: JobStatus) -> int:
    match = re.search(r"non-zero status of (\d+)", status.error)
    return int(match[1]) if match else 0
