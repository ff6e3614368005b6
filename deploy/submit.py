"""`python -m deploy submit TIER --recipe=…`: checks, packages, uploads, submits, and follows the job to its end."""

import argparse
import functools
import shlex
import sys
from collections.abc import Iterator, Sequence

from deploy.arguments import parse, parser
from deploy.backends import LABEL, PRICE_LABEL, ApiError, Backend, Request
from deploy.backends.gcloud import Gcloud
from deploy.checks import NoMachines, check_continent, sent_to_the_cloud
from deploy.desk import DESK, Desk, add_backend
from deploy.explain import Lost, exit_code, explained, stocked_out
from deploy.jobspec import Job, settings_on, training
from deploy.machines import load_machines
from deploy.patience import PATIENCE_S, Clock, patiently, waits
from deploy.place import needed_project, read_place
from deploy.record import Attempt, Record
from deploy.render import add_job_flags, new_submission, read_job
from deploy.ship import ship
from deploy.tier import Tier, load_tier
from deploy.watch import duration, note, watch_job
from trainer.errors import DONE, INTERRUPTED, UserError

LOOK_AFTER_S = 5.0  # a job just made may take a moment to be listed


def main(arguments: Sequence[str], desk: Desk = DESK) -> int:
    """Submits one job, on the first tier and region that has machines for it; the exit code says how it ended."""
    own = parser(
        "submit",
        "Submits a job to Vertex AI and follows it to its end.",
        "TIER --recipe=NAME --data=gs://… --bucket=gs://… [any trainer flag]",
    )
    add_job_flags(own)
    add_backend(own)
    own.add_argument("--dry_run", action="store_true", help="print the spec and the command that would run, and stop")
    own.add_argument("--detach", action="store_true", help="do not follow the job once it is submitted")
    own.add_argument("--regions", default="", metavar="A,B", help="regions to try in this order, instead of --region")
    own.add_argument("--fallback", default="", metavar="TIER,TIER", help="tiers to try where there are no machines")
    asked, flags = parse(own, arguments)
    record = Record(new_submission())
    jobs = _candidates(asked, flags, record.submission)
    for job in jobs:
        print("\n".join(f"# {line}" for line in describe(job)), flush=True)
    if asked.dry_run:
        print(paste(jobs[0], asked.package, label_of(record.submission)))
        return DONE
    with explained(jobs[0].place):
        return _submit(jobs, record, asked, desk)


def _candidates(asked: argparse.Namespace, flags: Sequence[str], submission: str) -> list[Job]:
    """Every tier in every region, in the order in which they are tried; each is checked before anything is sent."""
    if asked.detach and (asked.regions or asked.fallback):
        raise UserError("--detach contradicts --regions and --fallback: that there are no machines shows only later")
    jobs, refused = [], []
    for name in [asked.tier, *filter(None, asked.fallback.split(","))]:
        tier = load_tier(name, asked.prices)
        with sent_to_the_cloud():
            settings_on(tier, flags)  # mistakes of the command itself are told before what depends on the account
        for region in asked.regions.split(","):
            place = read_place(argparse.Namespace(**{**vars(asked), "region": region or asked.region}))
            try:
                jobs.append(read_job(asked, flags, place, tier, submission))
            except NoMachines as error:
                refused.append((f"{name} in {place.region}", error))
    for what, why in refused if jobs else refused[:-1]:
        print(f"# left out: {what}: {why}")
    if not jobs:
        raise refused[-1][1]
    needed_project(jobs[0].place.project)
    return jobs


def describe(job: Job) -> Iterator[str]:
    """What is submitted, what it costs, what happens when it fails: lines for people."""
    tier = job.tier
    yield f"{job.name}: {tier.facts.machine} in {job.place.region}, {tier.strategy}"
    yield training(job.config)
    yield f"writes to {job.output}"
    yield price_and_limit(tier)
    if tier.spec.get("scheduling", {}).get("disableRetries"):
        yield "what exits non-zero is not restarted (disableRetries)"
    else:
        whole = tier.spec.get("scheduling", {}).get("restartJobOnWorkerRestart")
        what = "with all other workers" if whole else "in place"
        yield f"a worker that exits non-zero is restarted {what}, up to 5 times, then the job up to 3 times"
    yield from (f"warning: {line}" for line in job.warnings)


def price_and_limit(tier: Tier) -> str:
    """What a job on `tier` costs an hour and at most, and when it is ended."""
    limit = f"until its timeout of {duration(tier.timeout_s)}"
    if tier.price_per_hour is None:
        return f"the price of this tier is not known (--prices=FILE); it runs {limit} at most"
    table = load_machines()
    estimate = f" (estimate of {table.date} for {table.region})" if tier.price_inferred else ""
    return f"{tier.price_per_hour:.2f} USD an hour{estimate}, {tier.most_usd:.2f} USD at most, {limit}"


def paste(job: Job, package: str, label: str) -> str:
    """Commands for a shell that do what `submit` would."""
    lines = []
    if job.packages:
        flags = [f"--bucket={job.place.bucket}", f"--project={job.place.project}"]
        lines.append(
            shlex.join(["python", "-m", "deploy", "package", *flags, *([f"--package={package}"] if package else [])])
        )
    gcloud = Gcloud(job.place.project, job.place.region)
    return "\n".join([*lines, gcloud.paste(_request(job, label))])


def _request(job: Job, label: str) -> Request:
    """`label` is of this attempt alone: it finds the job that a lost answer may have made."""
    price = job.tier.price_per_hour
    priced = {} if price is None else {PRICE_LABEL: f"{price:.4f}".replace(".", "-")}
    return Request(job.name, job.spec, {LABEL: label, **priced})


def _submit(jobs: Sequence[Job], record: Record, asked: argparse.Namespace, desk: Desk) -> int:
    """Ships the packages, then tries the jobs in order: the next only when the last is over, for want of machines."""
    first = jobs[0]
    backend = desk.open(asked.backend, first.place.project, first.place.region)
    for job in jobs:
        check_buckets(job, backend, desk.clock)
    ship(first.packages, first.place.bucket, backend, desk.clock)
    for more, job in zip(range(len(jobs) - 1, -1, -1), jobs, strict=True):
        backend = desk.open(asked.backend, job.place.project, job.place.region)
        code = _attempt(job, record, asked.detach, backend, desk.clock, bool(more))
        if code is not None:
            return code
        print(f"{job.name}: {record.attempts[-1].error}\ntrying the next", flush=True)
    raise AssertionError("the last attempt has a code")


def check_buckets(job: Job, backend: Backend, clock: Clock) -> None:
    """UserError where what is read is not there, or lies on another continent than the machines, or the output does."""
    inputs = {name: address for name, address in job.config.inputs.items() if address.startswith("gs://")}
    for bucket in sorted({"/".join(address.split("/")[:3]) for address in (job.output, *inputs.values())}):
        check_continent(bucket, job.place.region, patiently(functools.partial(backend.location, bucket), clock))
    for name, address in inputs.items():
        if not patiently(functools.partial(backend.holds, address), clock):
            raise UserError(f"{name}={address}: nothing lies there: check with `gcloud storage ls {address}`")


def _attempt(job: Job, record: Record, detach: bool, backend: Backend, clock: Clock, more: bool) -> int | None:
    """The exit code, or None where there are no machines for this job and `more` can be tried."""
    try:
        name = create(job, record, backend, clock)
    except ApiError as error:
        if error.quota and more:
            return None
        raise
    if detach:
        print(f"come back: python -m deploy watch {name}")
        return DONE
    status = watch_job(backend, name, job.place, clock)
    if status is None:
        return INTERRUPTED
    note(record, record.attempts[-1], status, clock.now())
    return None if more and stocked_out(status) else exit_code(status)


def create(job: Job, record: Record, backend: Backend, clock: Clock) -> str:
    """Makes the job and returns its name; what was tried is kept before, what came of it after."""
    project, region = job.place.project, job.place.region
    attempt = Attempt(job.tier.name, project, region, job.tier.price_per_hour, job.output)
    record.attempts.append(attempt)
    record.write()
    look = f"see `python -m deploy jobs --project={project} --region={region}` for whether the job was made"
    try:
        name = create_once(backend, _request(job, label_of(record.submission, len(record.attempts))), clock)
    except Lost as error:
        attempt.error = str(error)
        record.write()
        raise Lost(error.code, f"{error}: {look}") from None
    except (ApiError, UserError) as error:
        attempt.state, attempt.error = "NOT SUBMITTED", str(error)
        record.write()
        raise
    except KeyboardInterrupt:
        print(f"stopped while submitting: {look}", file=sys.stderr)
        raise
    attempt.job, attempt.state = name, "SUBMITTED"
    record.write()
    number = name.rsplit("/", 1)[-1]
    page = f"https://console.cloud.google.com/vertex-ai/locations/{region}/training/{number}"
    print(f"submitted {name}\n{page}?project={project}", flush=True)
    return name


def label_of(submission: str, attempt: int = 1) -> str:
    """The label of a submission's attempt, counted from 1."""
    return f"{submission}-{attempt}"


def create_once(backend: Backend, request: Request, clock: Clock) -> str:
    """The name of the one job of this request, however often the service fails: looked for before it is made again.

    Lost where a job may have been made and none is found.
    """
    began, unclear = clock.now(), False
    for wait in waits(LOOK_AFTER_S):
        try:
            name = backend.submit(request)
        except ApiError as error:
            failed = error
        else:
            return _looked_for(request, backend, clock, name) if unclear else name
        unclear = unclear or failed.may_have_worked
        last = not failed.transient or clock.now() + wait - began > PATIENCE_S
        if last and not unclear:
            raise failed
        print(f"the submission failed ({failed}): looking whether the job was made", file=sys.stderr, flush=True)
        clock.sleep(wait)
        made = unclear and _looked_for(request, backend, clock)
        if made:
            return made
        if last:
            raise Lost(0, f"the submission failed ({failed}), and no job of it is listed yet")
    raise AssertionError("waits never ends")


def _looked_for(request: Request, backend: Backend, clock: Clock, name: str = "") -> str:
    """`_only_one`, else `name`, a job that was made for certain; Lost where the service does not tell of any."""
    try:
        return _only_one(request, backend, clock) or name
    except ApiError as error:
        reason = f"whether an answer that was lost made a job cannot be learnt ({error})"
        if not name:
            raise Lost(error.code, reason) from None
        print(f"warning: {reason}: see `python -m deploy jobs`, and cancel a double", file=sys.stderr, flush=True)
        return name


def _only_one(request: Request, backend: Backend, clock: Clock) -> str:
    """The oldest job of this request, or nothing; others, made by a service that was slow to list it, are cancelled."""
    made = patiently(lambda: backend.jobs(request.labels[LABEL]), clock)
    names = [status.name for status in sorted(made, key=lambda status: status.created or 0.0)]
    for name in names[1:]:
        patiently(functools.partial(backend.cancel, name), clock)
    return names[0] if names else ""
