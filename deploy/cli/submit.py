"""Submits a job to Vertex AI: `python -m deploy submit TIER --recipe=…` checks, packages, uploads,
submits, follows."""

import shlex
import signal
import sys
from collections.abc import Sequence
from typing import Any

from deploy.api.request import parse_verb
from deploy.api.submit import NOTHING_SENT, USAGE, SubmitOptions, prepare_submission
from deploy.base.console import say
from deploy.cli.output import JSON, write_document
from deploy.job.fallback import SubmittedJob
from deploy.job.sending import check_resources, upload_packages
from deploy.platform.errors import exit_code
from deploy.platform.gcloud_and_sdk import Gcloud, to_yaml
from deploy.platform.local import on_signals
from trainer.base.errors import DONE, INTERRUPTED, UserError
from trainer.base.log import forget
from trainer.base.settings.fields import options_class, setting
from trainer.base.storage import local_path, make_writable, write_whole


@options_class
class SubmitFlags(SubmitOptions):
    """Holds the flags of `submit`."""

    dry_run: bool = setting(False, "print what would run and what it may cost, and stop")
    spec: bool = setting(
        False,
        "print the job's spec, as `gcloud ai custom-jobs create --config` takes it, and stop; the"
        " text is on stderr",
    )
    out: str = setting(
        "",
        "write the job's spec to FILE, upload its packages, print the gcloud command that sends it,"
        " and stop",
        "FILE",
    )
    json: bool = JSON


def main(arguments: Sequence[str]) -> int:
    """Submits one job, on the first tier and region with machines, or shows it."""
    request = parse_verb(SubmitFlags, arguments, USAGE)
    flags = request.options
    both = "contradict each other"
    if flags.spec and flags.json:
        raise UserError(
            f"--spec and --json {both}: each takes all of stdout, and the document has the spec:"
            " drop one of them"
        )
    if flags.spec and flags.out:
        raise UserError(
            f"--spec and --out {both}: the one prints what the other writes: drop one of them"
        )
    if flags.dry_run and flags.out:
        raise UserError(f"--dry_run and --out {both}: a dry run uploads nothing: drop one of them")
    unfollowed = "spec" if flags.spec else "out" if flags.out else ""
    submission = prepare_submission(request, unfollowed)
    if flags.spec:
        say(
            *submission.about,
            "nothing was sent or uploaded, and a spec has neither labels nor a key: --out=FILE "
            "uploads, and prints the whole command",
        )
        print(to_yaml(submission.jobs[0].spec), end="", flush=True)
        return DONE
    return (
        write_command(submission, flags)
        if flags.out
        else send_and_follow(submission, flags, "submit")
    )


def send_and_follow(submission: SubmittedJob, flags: Any, verb: str) -> int:
    """Submits and follows the job, or shows it with --dry_run; returns the exit code."""
    say(*submission.about)
    if flags.dry_run:
        asked = submission.confirmation().lines()
        say(*asked, NOTHING_SENT)
        _write_requests(submission, flags, verb, [*submission.about, *asked])
        return DONE
    with on_signals(signal.default_int_handler, signal.SIGTERM):  # as Ctrl-C
        job = submission.send()
        code = DONE
        if flags.detach:
            say(f"watch it: python -m deploy watch {job.name}")
        else:
            status = job.follow()
            code = exit_code(status) if status else INTERRUPTED
    try:
        write_document(
            flags,
            verb,
            submission=job.record.submission,
            job=job.name,
            attempts=job.record.attempts,
            exit_code=code,
        )
    except BrokenPipeError:  # the exit code of the job counts, whether or not anybody reads on
        forget(sys.stdout)
    return code


def write_command(submission: SubmittedJob, flags: Any) -> int:
    """Writes the job's spec, uploads its packages and prints the command that sends it."""
    job = submission.jobs[0]
    file = local_path(flags.out, "out")
    make_writable(file.parent, "out")
    say(*submission.about)
    check_resources([job])
    upload_packages([job])
    request = job.request()
    write_whole(file, to_yaml(request.spec))
    command = Gcloud(job.gcp.project, job.gcp.region).create_command(request, flags.out)
    say(
        f"nothing was sent: {flags.out} has the spec, and this command sends it:",
        shlex.join(command),
    )
    _write_requests(submission, flags, "submit", submission.about)
    return DONE


def _write_requests(submission: SubmittedJob, flags: Any, verb: str, about: Sequence[str]) -> None:
    requests = []
    for job in submission.jobs:
        request = job.request()
        requests.append(
            {
                "tier": job.tier.name,
                "project": job.gcp.project,
                "region": job.gcp.region,
                "output": job.output,
                "display_name": request.display_name,
                "labels": request.labels,
                "spec": request.spec,
                "usd_per_hour": job.tier.price_per_hour,
                "most_usd": job.tier.most_usd,
            }
        )
    write_document(flags, verb, requests=requests, about=about)
