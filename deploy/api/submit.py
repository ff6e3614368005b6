"""Submits jobs: checks the options, describes the job and what it costs, and prepares what sends
and follows it."""

import secrets
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TextIO

from deploy.api.request import USUAL, Value, VerbRequest, call_verb, verb_usage
from deploy.base.console import printed_on, say
from deploy.job.cost import cost_confirmation, format_duration, price_and_limit
from deploy.job.fallback import SubmittedJob
from deploy.job.job import Job
from deploy.job.ledger import Submission
from deploy.job.options import JobOptions
from deploy.job.script import Script
from deploy.job.spec import machine_spec
from deploy.job.workload import Program, workload_on
from deploy.packaging.image_choice import check_image, installs
from deploy.packaging.packages import CodeArchive, Package, packages_with
from deploy.planning.cached_plans import FIT, best_memory_option, plan_of
from deploy.planning.paid_jobs import cost_lines, memory_lines, paid_job, planned_usd
from deploy.platform.model_registry import checked_name, serving_image
from deploy.tiers.gcp_config import NoMachines, needed_project, read_gcp_config, regions_in
from deploy.tiers.tier import Tier, load_tier, machine_tier
from trainer.base.errors import UserError
from trainer.base.limit_watch import LIMITS, read_limits
from trainer.base.run_files.job_files import GPU_CHECK
from trainer.base.settings.fields import options_class, setting

NOTHING_SENT = (
    "nothing was sent: the same command without --dry_run checks login, bucket, data and quota, and"
    " sends it"
)


@options_class
class SubmitOptions(JobOptions):
    """Holds the options of `submit`."""

    tiers: tuple[str, ...] = setting(
        (),
        "a file such as job_configs/l4x4.yaml, or its bare name, l4x4; of several "
        "the next is tried where there are no machines",
        "TIER",
        positional=True,
    )
    region: str = setting(
        "",
        "as us-central1 (default: gcloud's ai/region); of several the next is tried where there are"
        " no machines",
        "NAME,NAME",
    )
    machine_type: str = setting("", "a machine instead of a TIER, as g2-standard-4", "NAME")
    accelerator: str = setting("", "its accelerators, as NVIDIA_L4:1", "NAME[:COUNT]")
    name: str = setting("", "display name (default: recipe, tier and time)", "TEXT")
    tensorboard_instance: str = setting(
        "",
        "the TensorBoard of Vertex AI that shows the job's logs/: its full name or id"
        " (docs/permissions.md)",
        "NAME",
    )
    disable_retries: bool = setting(False, "no restart on failure, as measurements need it")
    fit: bool = setting(False, FIT)
    check: bool = setting(
        False, "check the tier's GPUs (trainer.check --on_gpus) instead of training: some minutes"
    )
    detach: bool = setting(False, "do not follow the job once it is submitted")
    again: bool = setting(False, "send another job although one of the same command runs")
    register: str = setting(
        "",
        "make the model a version of NAME in the Model Registry when the job has ended well"
        " (docs/serving.md)",
        "NAME",
    )


USAGE = verb_usage(
    "submit",
    "TIER … --recipe=NAME --data=gs://… --bucket=gs://… [any trainer flag]",
    "Submits a job to Vertex AI and follows it to its end.",
    USUAL,
)


def submit(
    *tiers: str,
    recipe: str | None = None,
    bucket: str | None = None,
    max_cost: float | None = None,
    settings: Mapping[str, Value] | None = None,
    dry_run: bool = False,
    stream: TextIO | None = None,
    **options: Value,
) -> SubmittedJob:
    """Submits one job, on the first tier and region with machines, and returns it once created.

    `settings`: the trainer's, such as learning_rate; `options`: fields of SubmitOptions, such as
        region or spot=True; `max_cost`: in USD; `dry_run`: checks and describes the job, and sends
        nothing. Prints about the job on `stream`. Raises UserError for what the command would
        refuse or ask to confirm: a job that may cost more than 50 USD by its plan, or more than 500
        USD without a plan, needs a max_cost. Raises PlatformFault if the service fails; its exit
        code 69 says that the job may exist.
    """
    keywords = {"recipe": recipe, "bucket": bucket, "max_cost": max_cost, **options}
    with printed_on(stream):
        request = call_verb(SubmitOptions, tiers, keywords, settings, USAGE)
        job = prepare_submission(request)
        say(*job.about)
        return job if dry_run else job.send()


def prepare_submission(request: VerbRequest[Any], unfollowed: str = "") -> SubmittedJob:
    """Returns the checked submission that a request of SubmitOptions describes, and sends nothing.

    Raises UserError if it must fail.

    `unfollowed`: the command's flag, if any, after which nobody follows the job.
    """
    options: SubmitOptions = request.options
    program: Program = request.program
    register = ("", "")
    unfollowed = unfollowed or ("detach" if options.detach else "")
    if options.register:
        if unfollowed or options.check or isinstance(program, Script):
            raise UserError(
                "--register needs a training that is followed to its end: drop --detach, --spec,"
                " --out, --check or --script"
            )
        image = "" if installs(options.image) else options.image
        register = (checked_name(options.register), serving_image(image))
    if options.check and not program.values.keys() & {"recipe", "model"}:
        # a small recipe, whose data come with the package
        program = program.replace(recipe="wgan_gp_digits")
    jobs = _candidates(options, program, unfollowed)
    memory = memory_lines(
        [] if options.check else [job.workload for job in jobs], force=options.force
    )
    uris = dict.fromkeys(package.uri(job.gcp.bucket) for job in jobs for package in job.packages)
    about = [*describe(jobs), *memory]
    return submission_of(jobs, about, [*uris], request.command, options, register)


def submission_of(
    jobs: Sequence[Job],
    about: Sequence[str],
    sources: list[str],
    command: str,
    options: Any,
    register: tuple[str, str] = ("", ""),
) -> SubmittedJob:
    """Returns the submission of one of these checked jobs.

    `about`, `register`, `sources`: as of SubmittedJob and of Submission; `options`: the options of
        the command.
    """
    tiers = [job.tier for job in jobs]
    confirmation = partial(cost_confirmation, tiers, planned_usd(jobs), options, alternatives=True)
    record = Submission(jobs[0].submission, [], command, sources, options.detach)
    return SubmittedJob(jobs, record, about, confirmation, register)


def packages_of(options: JobOptions, program: Program) -> Sequence[Package]:
    """Returns the packages of the code that a job runs.

    Those of the trainer are in an image of the user's own. Raises UserError for a bad image or
    package.
    """
    check_image(options.image)
    own_image = options.image != "" and not installs(options.image)
    if isinstance(program, Script):
        ours = packages_with("") if program.launched and not own_image else []
        return [program.package(), *ours]
    if own_image and options.package:
        raise UserError(
            "--image and --package contradict each other: build the package into the image"
        )
    if own_image:
        return []
    packages = packages_with(
        options.package, options.max_package_mb, options.include, force=options.force
    )
    for package in packages[:1]:  # the user's, if there is one
        if files := {f"code/{name}": path for name, path in package.data.items()}:
            packages.append(CodeArchive(f"{package.name}-data", "0", files))
    return packages


def new_submission() -> str:
    """Returns a unique name for a submission that can be a label: time and random digits."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def _candidates(options: SubmitOptions, program: Program, unfollowed: str) -> list[Job]:
    """Returns a checked job for every tier in every region, in the order of the attempts."""
    code = packages_of(options, program)
    submission = new_submission()
    if options.tiers and (options.machine_type or options.accelerator):
        flag = "--machine_type" if options.machine_type else "--accelerator"
        raise UserError(
            f"tier {' '.join(options.tiers)} and {flag} contradict each other: a tier has its"
            " machine: drop one of them"
        )
    if not (options.tiers or options.machine_type):
        raise UserError(
            "TIER is missing: name one of job_configs/, as l4x4, or a machine, as"
            " --machine_type=g2-standard-12 --accelerator=NVIDIA_L4:1"
        )
    # The tiers in the order of the command, each in every region.
    changes = partial(machine_spec, options)
    tiers = [load_tier(name, options.prices, changes) for name in dict.fromkeys(options.tiers)]
    tiers = tiers or [
        machine_tier(options.machine_type, options.accelerator, options.prices, changes)
    ]
    regions = regions_in(options.region)
    if unfollowed and len(tiers) * len(regions) > 1:
        raise UserError(
            f"--{unfollowed} is for one tier in one region: a spec has one job, and of a job that"
            " is not followed nobody knows whether it has machines"
        )
    jobs = list[Job]()
    left_out = list[tuple[str, NoMachines]]()
    for tier in tiers:
        # Mistakes in the command are reported before those of the account, such as a missing
        # project.
        fitted = program
        if options.fit and not options.check and not isinstance(program, Script):
            config = program.config
            if chosen := best_memory_option(tier, plan_of(config, program), config):
                fitted = program.replace(**{chosen.name: chosen.value})
        work = workload_on(tier, fitted)
        for region in regions:
            gcp = read_gcp_config(options.project, region, options.bucket)
            try:
                jobs.append(paid_job(work, gcp, options, submission, code))
            except NoMachines as error:
                left_out.append((f"{tier.name} in {gcp.region}", error))
    for place, reason in left_out if jobs else left_out[:-1]:
        say(f"# left out: {place}: {reason}")
    if not jobs:
        raise left_out[-1][1]
    needed_project(jobs[0].gcp.project)
    check_wait(options.max_wait, jobs[0].tier, unfollowed)
    return jobs


def check_wait(max_wait: float | None, tier: Tier, unfollowed: str) -> None:
    """Raises UserError if nobody would cancel a job that waits longer than --max_wait.

    `unfollowed`: the flag with which the job is not followed, if any.
    """
    if unfollowed and max_wait and tier.strategy != "FLEX_START":
        raise UserError(
            f"--{unfollowed} contradicts --max_wait: nobody would cancel the job then: drop one of"
            " them"
        )


def describe(jobs: Sequence[Job]) -> list[str]:
    """Returns lines on jobs: what runs, on which machines, where it writes, what it costs.

    A line that is the same for several jobs appears once.
    """
    check = f"trains nothing: checks the accelerators of one machine ({GPU_CHECK}, docs/gpus.md)"
    lines = [check if job.options.check else job.workload.about for job in jobs]
    # Where each runs, in which image and with which packages, and where it writes.
    for job in jobs:
        place = f"{job.name}: {job.tier.machine} in {job.gcp.region}, {job.tier.strategy}"
        place += f", of the persistent resource {job.tier.resource}" if job.tier.resource else ""
        wait = job.tier.scheduling.get("maxWaitDuration")
        place += f", waits for machines for {wait} at most (--max_wait)" if wait else ""
        lines.append(place)
    for job in jobs:
        lines += job.about or [
            f"runs in {job.spec['workerPoolSpecs'][0]['containerSpec']['imageUri']}"
        ]
    for job in jobs:
        ships = (package.about for package in job.packages if package.about)
        names = ", ".join(package.name for package in job.packages)
        lines += [*ships, f"{names}, in {job.gcp.bucket}/packages"] if job.packages else []
    lines += [f"writes to {job.output}" for job in jobs]
    # What each costs, and when it ends by itself.
    lines += [f"{job.tier.name}: {price_and_limit(job.tier)}" for job in jobs]
    for job in jobs:
        if job.tier.strategy == "SPOT":
            ends = job.tier.scheduling.get("disableRetries")
            then = "ends" if ends else "starts again on others"
            lines.append(f"Google may take SPOT machines away: the job then {then}")
        stop = read_limits({LIMITS: job.limits or "{}"})
        if stop.idle_s:
            idle = format_duration(stop.idle_s)
            lines.append(f"{job.tier.name}: ends itself if all GPUs are idle for {idle}")
        if stop.over_s:
            limit = format_duration(stop.over_s)
            lines.append(
                f"{job.tier.name}: saves and ends itself after {limit}, {stop.factor:g} times the"
                " upper end of its plan"
            )
    limits = [job.tier.most_usd for job in jobs]
    if len(jobs) > 1 and None not in limits:
        lines.append(
            f"{len(jobs)} jobs, of which the next is sent only if the one before never started: "
            f"{max(filter(None, limits)):.2f} USD at most together"
        )
    lines += cost_lines(jobs)
    lines += [f"warning: {line}" for job in jobs for line in job.warnings]
    return list(dict.fromkeys(lines))
