"""Finds the plan that is kept for a run's settings, makes it, and holds a job against it before it is sent."""

import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

from deploy.planning.forecast import Forecast, forecasts
from deploy.planning.interval import Interval
from deploy.planning.offers import STRATEGIES
from deploy.planning.tier_memory import FITS, NEAR, TOO_LARGE
from deploy.tiers.job_request import JobOptions, JobRequest
from deploy.tiers.job_spec import Job
from deploy.tiers.machine_table import load_machines
from deploy.tiers.output import say, stdout_of_programs
from deploy.tiers.tier import Tier
from trainer.base.errors import UserError
from trainer.base.run_files.limits import Limits
from trainer.base.run_files.plan_file import StepPlan, kept_plan, read_plan
from trainer.base.settings.resolution import Overrides
from trainer.base.settings.train_config import TrainConfig


def plan_of(config: TrainConfig, overrides: Overrides) -> StepPlan:
    """Returns the plan that is kept for these settings, made now, in a process of its own, if there is none."""
    path = kept_plan(config)
    if not path.is_file():
        say("measures steps on this machine's CPU, once for these settings …")
        flags = overrides.without("job_dir", "expect_devices").arguments()
        command = [sys.executable, "-m", "trainer.plan", *flags]
        code = subprocess.run(command, stdout=stdout_of_programs(), check=False).returncode
        if code:
            raise UserError(f"python -m trainer.plan ended with exit code {code}: see the line above")
    return read_plan(path)


def _forecast(tier: Tier, config: TrainConfig, *, own_image: bool = False) -> Forecast | None:
    """Returns what the kept plan says of a job on the tier; None without one. Raises UserError for a damaged one."""
    path = kept_plan(config)
    if not path.is_file():
        return None
    return forecasts([tier], read_plan(path), config, load_machines(), {}, own_image=own_image)[0]


def cost_lines(jobs: Iterable[Job]) -> list[str]:
    """Returns a warning for each job that its kept plan estimates to cost more than the sum at which it is stopped."""
    return list(dict.fromkeys(line for job in jobs for line in _of_cost(job)))


def _of_cost(job: Job) -> Iterator[str]:
    tier, usd = job.tier, estimated_usd(job)
    if usd and tier.most_usd is not None and usd.middle > tier.most_usd:
        yield (
            f"{tier.name}: warning: its plan estimates {usd.middle:.2f} USD ({usd.low:.2f} - {usd.high:.2f}) as "
            f"{STRATEGIES[tier.strategy]}, and the job is stopped at {tier.most_usd:.2f} USD: raise --max_cost (or its "
            "file's scheduling.timeout), or train fewer steps"
        )


def estimated_usd(job: Job) -> Interval | None:
    """Returns what the kept plan estimates that the job costs in USD; None without a plan or a price."""
    tier, training = job.tier, job.request.training
    if job.checks or training is None or tier.most_usd is None:
        return None
    with suppress(UserError):
        known = _forecast(tier, training.config, own_image=not job.image.plain)
        return next((offer.usd for offer in (known.offers if known else ()) if offer.strategy == tier.strategy), None)
    return None


def with_limits(request: JobRequest, options: JobOptions) -> JobOptions:
    """Returns the options of a job that takes along the limits at which it ends itself; those of a check as they are.

    Raises UserError for idle GPUs where there are none or nobody sees all, and for a limit by a plan without one.
    """
    if options.check:
        return options
    tier, factor = request.tier, options.stop_if_over
    if options.stop_if_idle_s and not tier.accelerators:
        raise UserError(f"--stop_if_idle is for GPUs, and {tier.name} has none: leave it out")
    if options.stop_if_idle_s and request.training is None and tier.workers > 1:
        raise UserError("--stop_if_idle is for a script on one machine: the workers of a script do not see each other")
    hours = _longest_hours(request, options) if factor else 0.0
    if hours is None:
        instead = "--plan makes one" if request.training else "a script has none: use --max_cost"
        raise UserError(f"stop_if_over={factor:g}: there is no plan of the time on {tier.name}: {instead}")
    return replace(options, limits=Limits(options.stop_if_idle_s, factor * hours * 3600, factor).text)


def _longest_hours(request: JobRequest, options: JobOptions) -> float | None:
    """Returns the upper end of the plan's hours, or of its USD if that is reached sooner; None without a plan."""
    training, tier = request.training, request.tier
    if training is None:
        return None
    if options.plan:
        plan_of(training.config, training.overrides)
    known = _forecast(tier, training.config)
    offers = known.offers if known else ()
    return next((min(offer.hours.high, offer.usd.high / offer.usd_per_hour)
                 for offer in offers if offer.strategy == tier.strategy), None)  # fmt: skip


def memory_lines(requests: Iterable[JobRequest], *, plan: bool, force: bool) -> list[str]:
    """Returns what the kept plans say of each tier's memory, or that nobody looked; alike tiers in one line.

    Nothing of a script: what it does is not known.

    plan: makes a plan that is missing first. Raises UserError if a run cannot fit, by more than the error of the
    prediction, unless `force`.
    """
    tiers: dict[str, list[str]] = {}
    for training in filter(None, (request.training for request in requests)):
        tier = training.tier
        if plan:
            plan_of(training.config, training.overrides)
        said, cannot = _of_memory(tier, training.config)
        if cannot and not force:
            raise UserError(f"{tier.name}: the run does not fit its memory: {said}: --force sends it anyway")
        tiers.setdefault(f"warning: does not fit the memory: {said}" if cannot else said, []).append(tier.name)
    return [f"{', '.join(dict.fromkeys(names))}: {said}" for said, names in tiers.items()]


def _of_memory(tier: Tier, config: TrainConfig) -> tuple[str, bool]:
    """Returns what is known of the tier's memory, and whether the run cannot fit it."""
    try:
        known = _forecast(tier, config)
    except UserError as error:
        return f"whether it fits the memory is not known: {error}", False
    if known is None:
        return "whether it fits the memory is not known: --plan measures it (some steps on this CPU)", False
    if known.fit is None:
        return "whether it fits the memory is not known: that of its devices is not in the table of machines", False
    said = {FITS: "fits the memory: ", NEAR: "warning: may not fit the memory: ", TOO_LARGE: ""}[known.fit.verdict]
    return f"{said}it {known.fit.words}", known.fit.verdict == TOO_LARGE
