"""Submits a job to Vertex AI: `python -m deploy submit TIER --recipe=…` checks, packages, uploads, submits, follows."""

import argparse
import dataclasses
import math
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial

from deploy.cli.arguments import command_line, parse_program, parser
from deploy.cli.job_flags import add_job_flags, add_plan_flags, package_command, read_changes, read_options
from deploy.cli.month_budget import add_budget_flags, check_budget_flags, hold_to_budget
from deploy.localrun.processes import on_signals
from deploy.planning.kept import cost_lines, estimated_usd, memory_lines, with_limits
from deploy.tiers.checks import NoMachines, sent_to_the_cloud
from deploy.tiers.gcp_config import needed_project, read_gcp_config, regions_in
from deploy.tiers.images import installs
from deploy.tiers.job_request import CHECK_S, JobOptions, JobRequest
from deploy.tiers.job_spec import Job, Program, render, request_on
from deploy.tiers.script import Script
from deploy.tiers.tier import one_machine, read_tiers_or_machine
from deploy.vertex.api import ApiError
from deploy.vertex.creation import look_for
from deploy.vertex.errors import exit_code, exit_on_api_error, stocked_out
from deploy.vertex.gcloud import Gcloud
from deploy.vertex.history import Submission, attempt_label, find_interrupted, record_status
from deploy.vertex.logs import watch_job
from deploy.vertex.registration import read_registration, register_run, serving_image
from deploy.vertex.registry import checked_name
from deploy.vertex.session import SESSION, Session, tell_accounts
from deploy.vertex.spending import price_and_limit
from deploy.vertex.submission import check_resources, custom_job, submit_job, upload_packages
from trainer.base.errors import DONE, INTERRUPTED, UserError
from trainer.base.run_files.run_layout import GPU_CHECK

FLEX_START_SLACK_S = 600.0  # for the service to end a wait by itself
# Without --max_cost a job is asked about if the upper end of its plan exceeds the first, or, without a plan, if what it
# costs until its timeout exceeds the second; in USD.
PLAN_UNASKED, LIMIT_UNASKED = 50.0, 500.0
WHAT, WHERE, COST, ALONG, REQUEST = "What runs", "Where", "What it costs", "What goes along", "The request"


def main(arguments: Sequence[str], session: Session = SESSION) -> int:
    """Submits one job, on the first tier and region with machines for it. Returns the exit code of how it ended."""
    cli = parser(
        "submit",
        "Submits a job to Vertex AI and follows it to its end.",
        "TIER … --recipe=NAME --data=gs://… --bucket=gs://… [any trainer flag]",
    )
    add_job_flags(cli)
    add_plan_flags(cli)
    cli.add_boolean("dry_run", "print what would run and what it may cost, and the request, and stop")
    cli.add_boolean("check", "check the tier's GPUs (trainer.check --on_gpus) instead of training: some minutes")
    cli.add_boolean("detach", "do not follow the job once it is submitted")
    cli.add_argument("--register", default="", metavar="NAME", help="make the model a version of NAME in the Model "
                     "Registry when the job has ended well (docs/serving.md)")  # fmt: skip
    add_budget_flags(cli)
    asked, program = parse_program(cli, arguments)
    check_budget_flags(asked)
    if asked.register:
        _check_registration(asked, program)
    if asked.check and not program.values.keys() & {"recipe", "model"}:
        program = program.replace(recipe="wgan_gp_digits")  # a small one, whose data are in the package
    options = read_options(asked, program)
    if asked.check:
        options = dataclasses.replace(options, subject=f"check-{options.subject}", check=True)
    jobs = _candidates(asked, program, options)
    sources = list(dict.fromkeys(package.uri(job.gcp.bucket) for job in jobs for package in job.packages))
    record = Submission(options.submission, command=command_line("submit", arguments), sources=sources)
    runs = [] if asked.check else [job.request for job in jobs]
    about = [*describe(jobs), *((COST, line) for line in cost_lines(jobs)),
             *((WHAT, line) for line in memory_lines(runs, plan=asked.plan, force=asked.force))]  # fmt: skip
    if asked.dry_run:
        _print_page(about)
        print(f"\n## {REQUEST}\n{paste(jobs[0], asked, attempt_label(record.submission))}")
        return DONE
    for _, line in about:
        print(f"# {line}", flush=True)
    with exit_on_api_error(jobs[0].gcp), on_signals(signal.default_int_handler, signal.SIGTERM):  # as Ctrl-C
        tell_accounts(asked.backend)
        code = _go_on(record, jobs, asked, session)
        if code is None:
            hold_to_budget(jobs, asked, session)
            _ask_for_cost(jobs, asked)
            code = _submit(jobs, record, asked, session)
        return code


def _check_registration(asked: argparse.Namespace, program: Program) -> None:
    """Raises UserError if the model of this job could not be registered at its end."""
    if asked.detach or asked.check or isinstance(program, Script):
        raise UserError("--register needs a training that is followed to its end: drop --detach, --check or --script")
    checked_name(asked.register)
    serving_image("" if installs(asked.image) else asked.image)


def _candidates(asked: argparse.Namespace, program: Program, options: JobOptions) -> list[Job]:
    """Returns a checked job for every tier in every region, in the order in which they are tried."""
    tiers = read_tiers_or_machine(asked.tiers, asked.machine_type, asked.accelerator, asked.prices, read_changes(asked))
    regions = regions_in(asked.region)
    if asked.detach and len(tiers) * len(regions) > 1:
        raise UserError("--detach is for one tier in one region: whether it has machines is known only later")
    jobs, refused = list[Job](), list[tuple[str, NoMachines]]()
    for tier in tiers:
        with sent_to_the_cloud():  # mistakes in the command come before those of the account
            request = request_on(one_machine(tier, CHECK_S) if asked.check else tier, program)
        _check_named(request)
        for region in regions:
            gcp = read_gcp_config(argparse.Namespace(**{**vars(asked), "region": region}))
            try:
                jobs.append(render(request, gcp, with_limits(request, options)))
            except NoMachines as error:
                refused.append((f"{tier.name} in {gcp.region}", error))
    for what, why in refused if jobs else refused[:-1]:
        print(f"# left out: {what}: {why}")
    if not jobs:
        raise refused[-1][1]
    needed_project(jobs[0].gcp.project)
    if asked.detach and asked.max_wait and jobs[0].tier.strategy != "FLEX_START":
        raise UserError("--detach contradicts --max_wait: nobody would cancel the job then: drop one of them")
    return jobs


def _check_named(request: JobRequest) -> None:
    """Raises UserError if nobody named what is trained: the default, a GAN on digits, is for trying things out."""
    training = request.training
    task = request.tier.spec["workerPoolSpecs"][0]
    arguments = (task.get("pythonPackageSpec") or task.get("containerSpec") or {}).get("args", [])
    in_file = {argument.partition("=")[0].removeprefix("--") for argument in arguments}
    if training and not {"recipe", "model"} & {*training.overrides.values, *in_file}:
        raise UserError("recipe is missing: a job is paid for: name what it trains, by --recipe= or --model=")


def describe(jobs: Iterable[Job]) -> Iterator[tuple[str, str]]:
    """Yields (heading, line): what is submitted, where, what goes along, what it costs, what happens when it fails."""
    for job in jobs:
        tier, scheduling = job.tier, job.tier.spec.get("scheduling", {})
        yield WHAT, f"{job.name}: {tier.machine} in {job.gcp.region}, {tier.strategy}"
        yield WHAT, job.request.about
        if job.checks:
            yield WHAT, f"trains nothing: checks the accelerators of one machine ({GPU_CHECK}, docs/gpus.md)"
        yield WHERE, f"writes to {job.output}"
        if tier.strategy == "FLEX_START":
            yield WHERE, f"waits for machines for {scheduling['maxWaitDuration']} at most (--max_wait)"
        yield from ((ALONG, package.about) for package in job.packages if package.about)
        if job.packages:
            yield ALONG, f"{', '.join(package.name for package in job.packages)}, in {job.gcp.bucket}/packages"
        yield from ((WHERE, line) for line in job.about)
        yield COST, price_and_limit(tier)
        if scheduling.get("disableRetries"):
            yield WHERE, "a worker that exits non-zero is not restarted (disableRetries)"
        else:
            what = "with all other workers" if scheduling.get("restartJobOnWorkerRestart") else "in place"
            yield WHERE, f"a worker that exits non-zero is restarted {what}, up to 5 times, then the job up to 3 times"
        yield from ((WHAT, f"warning: {line}") for line in job.warnings)


def _print_page(about: Sequence[tuple[str, str]]) -> None:
    for heading in (WHAT, WHERE, COST, ALONG):
        if lines := dict.fromkeys(f"# {line}" for place, line in about if place == heading):
            print("\n".join([f"## {heading}", *lines]), flush=True)


def paste(job: Job, asked: argparse.Namespace, label: str) -> str:
    """Returns shell commands that do what `submit` would."""
    gcloud = Gcloud(job.gcp.project, job.gcp.region)
    return "\n".join(filter(None, [package_command(job, asked), gcloud.shell_command(custom_job(job, label))]))


def _go_on(record: Submission, jobs: Sequence[Job], asked: argparse.Namespace, session: Session) -> int | None:
    """Follows the job of the same command that was interrupted before, to its end; None if there is none."""
    earlier = find_interrupted(record.command, record.sources)
    if earlier is None:
        return None
    attempt, clock = earlier.attempts[-1], session.clock
    backend = session.open(asked.backend, attempt.project, attempt.region)
    attempt.job = attempt.job or look_for(earlier.label, backend, clock, attempt.sent_at)
    if not attempt.job:
        return None
    print(f"goes on with {attempt.job}, which the same command submitted before", flush=True)
    if asked.detach:
        attempt.state = "SUBMITTED"
        earlier.write()
        return DONE
    job = next((job for job in jobs if (job.tier.name, job.gcp.region) == (attempt.tier, attempt.region)), jobs[0])
    return _follow(job, earlier, asked, session, more=False)


def _ask_for_cost(jobs: Sequence[Job], asked: argparse.Namespace) -> None:
    """Prints what the jobs may cost. Without --max_cost it asks about much; UserError if the answer is not yes."""
    plans = [estimate for job in jobs if (estimate := estimated_usd(job))]
    limit = max((job.tier.most_usd or 0.0 for job in jobs), default=0.0)
    high = max((plan.high for plan in plans), default=0.0)
    said = f"by its plan {high:.2f} USD at most" if plans else "there is no plan of it"
    text = f"this job may cost {limit:.2f} USD until its timeout; {said}"
    if asked.max_cost or asked.check or (high <= PLAN_UNASKED if plans else limit <= LIMIT_UNASKED):
        print(f"# {text}", flush=True)
        return
    answer = ""
    with suppress(EOFError):
        answer = input(f"{text}: submit it? [y/N] ") if sys.stdin and sys.stdin.isatty() else ""
    if answer.strip().lower() not in ("y", "yes"):
        raise UserError(f"{text}: not submitted: say what it may cost, as --max_cost=20")


def _submit(jobs: Sequence[Job], record: Submission, asked: argparse.Namespace, session: Session) -> int:
    """Uploads the packages, then tries the jobs in order, the next if there are no machines for the one before."""
    first = jobs[0]
    for job in jobs:
        check_resources(job)
    packages = {package.uri(job.gcp.bucket): package for job in jobs for package in job.packages}
    upload_packages(list(packages.values()), first.gcp.bucket)
    for more, job in zip(range(len(jobs) - 1, -1, -1), jobs, strict=True):
        code = _attempt(job, record, asked, session, bool(more))
        if code is not None:
            return code
        print(f"{job.name}: {record.attempts[-1].error}\ntries the next", flush=True)
    raise AssertionError("the last attempt has a code")


def _attempt(job: Job, record: Submission, asked: argparse.Namespace, session: Session, more: bool) -> int | None:
    """Returns the exit code, or None if there are no machines for this job and `more` can be tried."""
    try:
        name = submit_job(job, record, partial(session.open, asked.backend), session.clock)
    except ApiError as error:
        if error.unavailable and more:
            return None
        raise
    if asked.detach:
        print(f"watch it: python -m deploy watch {name}")
        return DONE
    return _follow(job, record, asked, session, more)


def _follow(job: Job, record: Submission, asked: argparse.Namespace, session: Session, more: bool) -> int | None:
    """Follows the job of the last attempt; returns as `_attempt`."""
    attempt = record.attempts[-1]
    backend, max_wait_s = session.open(asked.backend, attempt.project, attempt.region), asked.max_wait or math.inf
    if job.tier.strategy == "FLEX_START":  # the service ends the wait itself
        max_wait_s += FLEX_START_SLACK_S
    status = watch_job(backend, attempt.job, job.gcp, session.clock, created=True, max_wait_s=max_wait_s)
    if status is None:
        attempt.state = "INTERRUPTED"
        record.write()
        return INTERRUPTED
    attempt.job = status.name
    record_status(record, attempt, status, session.clock.now())
    code = None if more and stocked_out(status) else exit_code(status)
    if asked.register and code == DONE:
        image = serving_image("" if installs(asked.image) else asked.image)
        registration = read_registration(attempt.output, asked.register, image, job.gcp, status.name)
        register_run(registration, "", backend, session.clock)
    return code
