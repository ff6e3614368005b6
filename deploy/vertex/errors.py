"""What a failed call, or a failed job, means for the user."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from deploy.spec.gcp_config import GcpConfig
from deploy.vertex.api import ApiError, Broken, JobStatus
from trainer.errors import DONE, FAULT, INTERRUPTED, USER_MUST_CHANGE, UserError

LOST = 69  # exit code: how a job ends, or whether it was made, is not known (EX_UNAVAILABLE of sysexits.h)

# Exit status of a replica -> what it says. 128 + n: ended by signal n.
_EXITS = {
    1: "a fault of the program or the platform: its last lines above say which",
    2: "the trainer refused its settings, data or machine: the line that begins with error: says which",
    75: "interrupted with its state saved: submit it again with the same --job_dir to go on",
    134: "aborted (SIGABRT) in native code: TensorFlow's last lines above say why",
    137: "killed (SIGKILL), most often for memory: take a smaller batch or a machine with more of it",
    139: "crashed (SIGSEGV) in native code: image and driver may not fit each other",
    143: "stopped from outside (SIGTERM) before it ended",
}


class Lost(ApiError):
    """A job goes on, or may, and how it ends cannot be learnt now; the text says how to look. `code`: the reason's."""

    @property
    def quota(self) -> bool:
        """No other tier is tried while this job may run."""
        return False


@contextmanager
def explained(gcp: GcpConfig) -> Iterator[None]:
    """Ends a verb on an ApiError: with UserError where the user can mend it, else with exit code 1, or LOST."""
    try:
        yield
    except Lost as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(LOST)
    except ApiError as error:
        line = meaning(error, gcp)
        if not error.transient:
            raise UserError(line) from None
        print(f"error: {line}", file=sys.stderr)
        sys.exit(FAULT)


def meaning(error: ApiError, gcp: GcpConfig) -> str:
    """One line: what the service said, and what to do."""
    if isinstance(error, (Broken, Lost)):
        return str(error)
    if error.quota:
        return _quota(error, gcp)
    if error.code == 401:  # the service says much and always the same
        return f"not logged in, or no more (401): run `{error.login}`"
    cures = {
        400: "the service refused the job as it is: change it",
        403: _permission(str(error), gcp),
        404: _nothing_there(str(error), gcp),
    }
    otherwise = "the service fails: try again later" if error.transient else "refused for good: change what it names"
    return f"{error} ({error.code or 'no answer'}): {cures.get(error.code, otherwise)}"


# What a refusal names, a permission or an API -> the role that allows it; docs/permissions.md has them all.
_ROLES = {
    r"storage\.": "roles/storage.objectUser on the bucket",
    r"logging\.": "roles/logging.viewer on {project}",
    r"iam\.serviceAccounts\.|act as": "roles/iam.serviceAccountUser on the job's service account",
    "": "roles/aiplatform.user on {project}",
}


def _permission(said: str, gcp: GcpConfig) -> str:
    if "has not been used in project" in said or "SERVICE_DISABLED" in said:
        host = re.search(r"[a-z]+\.googleapis\.com", said)
        name = host[0] if host else "aiplatform.googleapis.com"
        return f"enable it: `gcloud services enable {name} --project={gcp.project}`"
    role = next(role for named, role in _ROLES.items() if re.search(named, said))
    return f"ask for {role.format(project=gcp.project)} (docs/permissions.md)"


def _nothing_there(said: str, gcp: GcpConfig) -> str:
    bucket = re.search(r"(?:gs://|/storage/v1/b/)([^/?\s:]+)", said)
    if bucket:
        return f"make it: `gcloud storage buckets create gs://{bucket[1]} --location={gcp.region or 'REGION'}`"
    return f"nothing of that name is there: look at --project={gcp.project} and --region={gcp.region}"


def _quota(error: ApiError, gcp: GcpConfig) -> str:
    metric = re.search(r"[\w.]*googleapis\.com/\w+", str(error))
    name = metric[0] if metric else "aiplatform.googleapis.com"
    return (
        f"no quota left in {gcp.region} for {name}: new projects often have 0: ask for more at "
        f"https://console.cloud.google.com/iam-admin/quotas?project={gcp.project} or take another region or tier "
        "(submit: --regions=, --fallback=)"
    )


def stocked_out(status: JobStatus) -> bool:
    """Whether the job failed because there were no machines, or no quota, for it."""
    words = r"stock-?out|resources are insufficient|insufficient .*(capacity|resources)|quota|resource_exhausted"
    return status.state in ("FAILED", "EXPIRED") and re.search(words, status.error, re.IGNORECASE) is not None


def exit_code(status: JobStatus) -> int:
    """The exit code of `watch` and `submit` for a job that is over."""
    if status.state == "SUCCEEDED":
        return DONE
    if status.state == "CANCELLED" or _replica_exit(status) == 75:
        return INTERRUPTED
    return USER_MUST_CHANGE if _replica_exit(status) == 2 else FAULT


def failure(status: JobStatus) -> str:
    """Why the job failed, with the exit status of its replica translated."""
    code = _replica_exit(status)
    return f"{status.error}: {code} means {_EXITS[code]}" if code in _EXITS else status.error


def _replica_exit(status: JobStatus) -> int:
    found = re.search(r"non-zero status of (\d+)", status.error)
    return int(found[1]) if found else 0
