"""Makes jobs that are to be paid for, each held against its cached plan: its timeout, limits, cost
and memory."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from deploy.base.console import run_program, say
from deploy.job.cost import format_duration
from deploy.job.job import Job
from deploy.job.options import JobOptions
from deploy.job.workload import Training, Workload
from deploy.packaging.image_choice import AUTO, Image, choose_image
from deploy.packaging.packages import Package
from deploy.planning.cached_plans import cached_plan, plan_of
from deploy.planning.forecast import PricedEstimate, forecast
from deploy.planning.recommendations import time_of
from deploy.planning.tier_memory import FITS, NEAR, TOO_LARGE, fit_on
from deploy.platform.automatic_image import automatic_image
from deploy.report.formatting import grouped
from deploy.tiers.gcp_config import GcpConfig
from deploy.tiers.spec_rules import task_of
from deploy.tiers.tier import STRATEGIES, Tier
from trainer.base.errors import UserError
from trainer.base.limit_watch import StopLimits
from trainer.base.settings.own_settings import has_own_code
from trainer.base.settings.train_config import TrainConfig

LEAST_LIMIT_S = 1800.0
PLANS = 3.0  # so many times the upper end of its plan, and at least LEAST_LIMIT_S, may a job take


def _cached_estimate(tier: Tier, config: TrainConfig, image: Image) -> PricedEstimate | None:
    """Returns the cached plan's estimate of a job in this image, under its tier's strategy.

    Returns None without a plan, a time or a price.
    """
    plan = cached_plan(config)
    if not plan:
        return None
    estimates = forecast(tier, plan, config, plain=image.installs).offers
    return next((priced for priced in estimates if priced.strategy == tier.strategy), None)


def cost_lines(jobs: Iterable[Job]) -> list[str]:
    """Returns a line on the cost that each job's cached plan estimates.

    The line is a warning if the estimate is above the cost at which the job is stopped.
    """
    lines = dict[str, None]()
    for job in jobs:
        tier = job.tier
        priced = estimate(job)
        if priced and tier.most_usd is not None:
            max_cost = job.options.max_cost
            usd = priced.usd.text("{:.2f}".format, " USD")
            line = f"its plan estimates {usd} as {STRATEGIES[tier.strategy]}, {time_of(priced)}"
            limit = format_duration(tier.timeout_s)
            line = f"{line}; after {limit} it ends, and the same command resumes it"
            if priced.usd.middle > tier.most_usd:
                # --max_cost sets a timeout of whole seconds, whose cost is lower by less than the
                # price of a second.
                second = priced.usd_per_hour / 3600
                limit = "--timeout"
                if max_cost is not None and tier.most_usd > max_cost - second:
                    limit = "--max_cost"
                stopped = (
                    f"and the job is stopped at {tier.most_usd:.2f} USD: raise {limit}, or train"
                    " fewer steps"
                )
                line = f"warning: {line}, {stopped}"
            lines[f"{tier.name}: {line}"] = None
    return [*lines]


def estimate(job: Job) -> PricedEstimate | None:
    """Returns the hours and the cost that the job's cached plan estimates; None without a plan or a
    price."""
    work = job.workload
    tier = job.tier
    if job.options.check or not isinstance(work, Training) or tier.most_usd is None:
        return None
    return _cached_estimate(tier, work.config, job.image)


def planned_usd(jobs: Iterable[Job]) -> list[tuple[float, float] | None]:
    """Returns the lower and the upper end of each job's cost in USD by its plan, in the form of
    `cost_confirmation`."""
    estimates = map(estimate, jobs)
    return [(priced.usd.low, priced.usd.high) if priced else None for priced in estimates]


def _prove(work: Training) -> None:
    """Proves, in a process of its own, that the number of GPUs does not change what a user's own
    model trains.

    Raises UserError for a model that the job would refuse. Data in a bucket, or that cannot be read
    here, are the job's to prove on.
    """
    config = work.config
    tier = work.tier
    if (
        not has_own_code(config)
        or tier.devices < 2
        or not tier.accelerators
        or config.allow_replica_dependence
    ):
        return
    code_is_here = not work.overrides.folder or Path(work.overrides.folder).samefile(".")
    remote = [path for path in config.inputs.values() if path.startswith(("gs://", "/gcs/"))]
    if code_is_here and not remote:
        _proof_of(tuple(work.overrides.without("job_dir", "expect_devices").arguments()))
    else:
        say(
            "the data or the code are not in this folder: the job proves first that replicas change"
            " nothing"
        )


@cache
def _proof_of(arguments: Sequence[str]) -> None:
    """Runs `trainer.check` for a job on several GPUs, once for these settings, and prints what it
    says."""
    say("proves here that the number of GPUs changes nothing (--no_check leaves that to the job)")
    run_program(
        "trainer.check",
        [*arguments, "--paid"],
        lambda line: None if line.startswith("error: ") else say(line),
    )


def paid_job(
    work: Workload,
    gcp: GcpConfig,
    options: JobOptions,
    submission: str,
    code: Sequence[Package] = (),
) -> Job:
    """Returns a job that is to be paid for: every verb makes its jobs here, with all checks.

    It has a timeout by its plan, if there is one, which --plan makes, and the limits at which it
    stops itself; a check of GPUs has neither. `code`: as of Job. Raises UserError for what is known
    to fail or to waste money, and NoMachines as Job does.
    """
    tier = work.tier
    priced = None
    if isinstance(work, Training):
        # The trainer's default, a GAN on digits, is for trying things out: a flag or the tier's
        # file names paid work.
        arguments = task_of(tier.spec["workerPoolSpecs"][0]).get("args", [])
        flags = {argument.partition("=")[0].removeprefix("--") for argument in arguments}
        if not {"recipe", "model"} & {*work.overrides.values, *flags}:
            raise UserError(
                "recipe is missing: a job is paid for: name what it trains, by --recipe= or"
                " --model="
            )
    # What the image of --image=auto has is known once the job is.
    if options.image == AUTO:
        plain = Job(work, gcp, options, submission, code)
        image, about = automatic_image(gcp, plain.requirements)
        job = paid_job(work, gcp, replace(options, image=image), submission, code)
        job.about = (*job.about, *about)
        return job
    if options.check:
        return Job(work, gcp, options, submission, code)
    # Its timeout, unless the tier's own is shorter, or the user gave one.
    if isinstance(work, Training):
        if options.plan:
            plan_of(work.config, work.overrides)
        priced = _cached_estimate(tier, work.config, choose_image(tier, options.image, None, ()))
    if priced and not options.timeout:
        limit_s = math.ceil(max(PLANS * priced.hours.high * 3600, LEAST_LIMIT_S))
        timeout = f"{min(limit_s, int(tier.timeout_s))}s"
        scheduling = {**tier.scheduling, "timeout": timeout}
        limited = replace(tier, spec={**tier.spec, "scheduling": scheduling})
        work = replace(work, tier=limited)
    # The limits at which it stops itself. No machine of a script sees the GPUs of all.
    factor = options.stop_if_over
    hours = 0.0
    if options.stop_if_idle and not tier.accelerators:
        raise UserError(f"--stop_if_idle is for GPUs, and {tier.name} has none: leave it out")
    if options.stop_if_idle and tier.workers > 1 and not isinstance(work, Training):
        raise UserError(
            "--stop_if_idle is for a script on one machine: the workers of a script do not see each"
            " other"
        )
    if factor and not priced:
        advice = "a script has none: use --max_cost"
        if isinstance(work, Training):
            advice = "--plan makes one"
        raise UserError(
            f"stop_if_over={factor:g}: there is no plan of the time on {tier.name}: {advice}"
        )
    if priced:
        hours = min(priced.hours.high, priced.usd.high / priced.usd_per_hour)
    limits = StopLimits(options.stop_if_idle, factor * hours * 3600, factor).text
    job = Job(work, gcp, options, submission, code, limits)
    if isinstance(work, Training) and not (options.force or options.no_check):
        _prove(work)
    return job


def memory_lines(works: Iterable[Workload], *, force: bool) -> list[str]:
    """Returns lines on whether each training fits its tier's memory; tiers of which the same is
    true share a line.

    The answer comes from cached plans; a line says so where there is none. Scripts have no line:
    their memory is not known. force: warn about a run that certainly does not fit, instead of
    raising UserError.
    """
    lines = []
    for training in (work for work in works if isinstance(work, Training)):
        tier = training.tier
        plan = cached_plan(training.config)
        fit = fit_on(plan, training.config, tier) if plan else None
        if fit:
            verdict = {
                FITS: "fits",
                NEAR: "warning: may not fit",
                TOO_LARGE: "warning: does not fit",
            }[fit.verdict]
            line = f"{verdict} the memory: it {fit.words}"
        else:
            missing = "the memory of its devices is not in the table of machines"
            why = missing if plan else "--plan measures it (some steps on this CPU)"
            line = f"whether it fits the memory is not known: {why}"
        if fit and fit.verdict == TOO_LARGE and not force:
            raise UserError(
                f"{tier.name}: the run does not fit its memory: it {fit.words}: --force sends it"
                " anyway"
            )
        lines.append((line, tier.name))
    return [f"{names}: {line}" for line, names in grouped(lines).items()]
