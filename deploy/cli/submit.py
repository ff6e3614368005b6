"""Submits a job to Vertex AI: `python -m deploy submit TIER --recipe=…` checks, packages, uploads, submits, follows."""

import argparse
import dataclasses
import functools
import itertools
import math
import signal
from collections.abc import Iterator, Sequence

from deploy.cli.arguments import parse_program, parser, seconds
from deploy.cli.job_flags import (
    add_job_flags,
    add_plan_flags,
    package_command,
    read_changes,
    read_options,
)
from deploy.cli.target import add_backend
from deploy.localrun.processes import on_signals
from deploy.planning.kept import cost_lines, memory_lines
from deploy.tiers.checks import NoMachines, sent_to_the_cloud
from deploy.tiers.gcp_config import needed_project, read_gcp_config
from deploy.tiers.images import installs
from deploy.tiers.job_request import JobOptions
from deploy.tiers.job_spec import CHECK_S, Job, Program, render, request_on
from deploy.tiers.script import Script
from deploy.tiers.tier import load_tier, one_machine
from deploy.vertex.api import ApiError
from deploy.vertex.errors import exit_code, exit_on_api_error, stocked_out
from deploy.vertex.gcloud import Gcloud
from deploy.vertex.history import Submission, record_status
from deploy.vertex.logs import watch_job
from deploy.vertex.registration import read_registration, register_run, serving_image
from deploy.vertex.registry import checked_name
from deploy.vertex.session import SESSION, Session, tell_accounts
from deploy.vertex.spending import price_and_limit
from deploy.vertex.submission import attempt_label, check_resources, custom_job, submit_job, upload_packages
from trainer.base.errors import DONE, INTERRUPTED, UserError
from trainer.base.run_files.run_layout import GPU_CHECK

FLEX_START_SLACK_S = 600.0  # for the service to end a wait by itself


def main(arguments: Sequence[str], session: Session = SESSION) -> int:
    """Submits one job, on the first tier and region with machines for it. Returns the exit code of how it ended."""
    cli = parser(
        "submit",
        "Submits a job to Vertex AI and follows it to its end.",
        "TIER --recipe=NAME --data=gs://… --bucket=gs://… [any trainer flag]",
    )
    add_job_flags(cli)
    add_plan_flags(cli)
    add_backend(cli)
    cli.add_boolean("dry_run", "print the spec and the command that would run, and stop")
    cli.add_boolean("check", "check the tier's GPUs (trainer.check --on_gpus) instead of training: some minutes")
    cli.add_boolean("detach", "do not follow the job once it is submitted")
    cli.add_argument("--regions", default="", metavar="A,B", help="regions to try in this order, instead of --region")
    cli.add_argument("--fallback", default="", metavar="TIER,TIER", help="tiers to try where there are no machines")
    cli.add_argument("--max_wait", type=seconds, metavar="TIME", help="the longest wait for machines, as 2h: then the "
                     "job is cancelled, and the next of --regions and --fallback tried")  # fmt: skip
    cli.add_argument("--register", default="", metavar="NAME", help="make the model a version of NAME in the Model "
                     "Registry when the job has ended well (docs/serving.md)")  # fmt: skip
    asked, program = parse_program(cli, arguments)
    if asked.register:
        _check_registration(asked, program)
    if asked.check and not program.values.keys() & {"recipe", "model"}:
        program = program.replace(recipe="wgan_gp_digits")  # a small one, whose data are in the package
    options = read_options(asked, program)
    if asked.check:
        options = dataclasses.replace(options, subject=f"check-{options.subject}", check=True)
    record = Submission(options.submission)
    jobs = _candidates(asked, program, options)
    runs = [] if asked.check else [job.request for job in jobs]
    of_memory = memory_lines(runs, plan=asked.plan, force=asked.force)
    if asked.dry_run:  # first: it is long, and what is said of the job must stay on the screen
        print(f"{paste(jobs[0], asked, attempt_label(record.submission))}\n")
    for line in (*itertools.chain.from_iterable(map(describe, jobs)), *of_memory, *cost_lines(jobs)):
        print(f"# {line}", flush=True)
    if asked.dry_run:
        return DONE
    with exit_on_api_error(jobs[0].gcp), on_signals(signal.default_int_handler, signal.SIGTERM):  # as Ctrl-C
        return _submit(jobs, record, asked, session)


def _check_registration(asked: argparse.Namespace, program: Program) -> None:
    """Raises UserError if the model of this job could not be registered at its end."""
    if asked.detach or asked.check or isinstance(program, Script):
        raise UserError("--register needs a training that is followed to its end: drop --detach, --check or --script")
    checked_name(asked.register)
    serving_image("" if installs(asked.image) else asked.image)


def _candidates(asked: argparse.Namespace, program: Program, options: JobOptions) -> list[Job]:
    """Returns a checked job for every tier in every region, in the order in which they are tried."""
    if asked.detach and (asked.regions or asked.fallback):
        raise UserError("--detach contradicts --regions and --fallback: whether there are machines is known only later")
    options = dataclasses.replace(options, max_wait_s=asked.max_wait)
    jobs, refused = [], []
    for name in [asked.tier, *filter(None, asked.fallback.split(","))]:
        tier = load_tier(name, asked.prices, read_changes(asked))
        tier = one_machine(tier, CHECK_S) if asked.check else tier
        with sent_to_the_cloud():
            request = request_on(tier, program)  # mistakes in the command come before those of the account
        for region in asked.regions.split(","):
            gcp = read_gcp_config(argparse.Namespace(**{**vars(asked), "region": region or asked.region}))
            try:
                jobs.append(render(request, gcp, options))
            except NoMachines as error:
                refused.append((f"{name} in {gcp.region}", error))
    for what, why in refused if jobs else refused[:-1]:
        print(f"# left out: {what}: {why}")
    if not jobs:
        raise refused[-1][1]
    needed_project(jobs[0].gcp.project)
    if asked.detach and asked.max_wait and jobs[0].tier.strategy != "FLEX_START":
        raise UserError("--detach contradicts --max_wait: nobody would cancel the job then: drop one of them")
    return jobs


def describe(job: Job) -> Iterator[str]:
    """Yields lines that state what is submitted, what it costs and what happens when it fails."""
    tier = job.tier
    yield f"{job.name}: {tier.machine} in {job.gcp.region}, {tier.strategy}"
    yield job.request.about
    if job.checks:
        yield f"trains nothing: checks the accelerators of one machine ({GPU_CHECK}, docs/gpus.md)"
    yield f"writes to {job.output}"
    yield from (package.about for package in job.packages if package.about)
    yield from job.about
    yield price_and_limit(tier)
    if tier.spec.get("scheduling", {}).get("disableRetries"):
        yield "a worker that exits non-zero is not restarted (disableRetries)"
    else:
        whole = tier.spec.get("scheduling", {}).get("restartJobOnWorkerRestart")
        what = "with all other workers" if whole else "in place"
        yield f"a worker that exits non-zero is restarted {what}, up to 5 times, then the job up to 3 times"
    yield from (f"warning: {line}" for line in job.warnings)


def paste(job: Job, asked: argparse.Namespace, label: str) -> str:
    """Returns shell commands that do what `submit` would."""
    gcloud = Gcloud(job.gcp.project, job.gcp.region)
    return "\n".join(filter(None, [package_command(job, asked), gcloud.shell_command(custom_job(job, label))]))


def _submit(jobs: Sequence[Job], record: Submission, asked: argparse.Namespace, session: Session) -> int:
    """Uploads the packages, then tries the jobs in order, the next if there are no machines for the one before."""
    first = jobs[0]
    tell_accounts(asked.backend)
    backend = session.open(asked.backend, first.gcp.project, first.gcp.region)
    for job in jobs:
        check_resources(job, backend, session.clock)
    packages = {package.uri(job.gcp.bucket): package for job in jobs for package in job.packages}
    upload_packages(list(packages.values()), first.gcp.bucket, backend, session.clock)
    for more, job in zip(range(len(jobs) - 1, -1, -1), jobs, strict=True):
        code = _attempt(job, record, asked, session, bool(more))
        if code is not None:
            return code
        print(f"{job.name}: {record.attempts[-1].error}\ntrying the next", flush=True)
    raise AssertionError("the last attempt has a code")


def _attempt(
    job: Job, record: Submission, asked: argparse.Namespace, session: Session, more: bool
) -> int | None:  # fmt: skip
    """Returns the exit code, or None if there are no machines for this job and `more` can be tried."""
    open_backend = functools.partial(session.open, asked.backend)
    try:
        name = submit_job(job, record, open_backend, session.clock)
    except ApiError as error:
        if error.unavailable and more:
            return None
        raise
    if asked.detach:
        print(f"watch it: python -m deploy watch {name}")
        return DONE
    backend, max_wait_s = open_backend(job.gcp.project, job.gcp.region), asked.max_wait or math.inf
    if job.tier.strategy == "FLEX_START":  # the service ends the wait itself
        max_wait_s += FLEX_START_SLACK_S
    status = watch_job(backend, name, job.gcp, session.clock, created=True, max_wait_s=max_wait_s)
    if status is None:
        return INTERRUPTED
    record.attempts[-1].job = status.name
    record_status(record, record.attempts[-1], status, session.clock.now())
    code = None if more and stocked_out(status) else exit_code(status)
    if asked.register and code == DONE:
        image = serving_image("" if installs(asked.image) else asked.image)
        registration = read_registration(job.output, asked.register, image, job.gcp, status.name)
        register_run(registration, "", backend, session.clock)
    return code
