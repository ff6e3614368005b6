"""Finds the plan that is kept for a run's settings, makes it, and holds a job against it before it is sent."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

from deploy.base.console import run_program, say
from deploy.job.job import Job
from deploy.job.workload import Order, Training, Workload
from deploy.planning.forecast import PricedEstimate, forecast
from deploy.planning.tier_memory import FITS, NEAR, TOO_LARGE, MemoryOption, fit_on
from deploy.report.formatting import figures
from deploy.tiers.machine_table import load_machines
from deploy.tiers.tier import STRATEGIES, Tier
from trainer.base.errors import UserError, refuse
from trainer.base.limit_watch import StopLimits
from trainer.base.run_files.plan_file import StepPlan, kept_plan, read_plan
from trainer.base.settings.resolution import Overrides
from trainer.base.settings.train_config import BLOCKS, TrainConfig

FIT = "if the run may not fit, add what makes it fit: the cheapest setting that keeps the numbers, else --micro_batches"


def plan_of(config: TrainConfig, overrides: Overrides) -> StepPlan:
    """Returns the plan that is kept for these settings, made now, in a process of its own, if there is none."""
    plan = _kept(config)
    if not plan:
        say("measures steps on this machine's CPU, once for these settings …")
        flags = overrides.without("job_dir", "expect_devices").arguments()
        run_program("trainer.plan", flags, lambda line: None if line.startswith("error: ") else say(line))
    return plan or read_plan(kept_plan(config))


def _kept(config: TrainConfig) -> StepPlan | None:
    """Returns the plan that is kept for these settings, with --remat that of a plain run; None without one.

    A file that cannot be read is as none: a cache is made again, not mended.
    """
    path, plain = kept_plan(config), replace(config, remat="")
    if config.remat == BLOCKS and not path.is_file() and (plan := _kept(plain)) and plan.recomputed:
        return plan.with_setting(plain, "remat", BLOCKS)[0]
    with suppress(UserError):
        return read_plan(path)
    return None


def best_memory_option(tier: Tier, plan: StepPlan, config: TrainConfig) -> MemoryOption | None:
    """Returns the best setting by which a run surely fits the tier, and says it (`--fit`).

    None if it fits as it is, or by no setting.
    """
    fit = fit_on(plan, config, tier, load_machines())
    if not fit or not fit.options:
        return None
    first, *others = map(str, fit.options)
    problem = "does not fit" if fit.verdict == TOO_LARGE else "may not fit"
    say(f"# {tier.name}: {problem} as it is: --fit adds {first}{', rather than ' * bool(others)}{', '.join(others)}")
    return fit.options[0]


def _estimated(tier: Tier, config: TrainConfig, *, own_image: bool = False) -> PricedEstimate | None:
    """Returns what the kept plan says of a job under its tier's strategy; None without a plan, a time or a price."""
    plan = _kept(config)
    if not plan:
        return None
    offers = forecast(tier, plan, config, load_machines(), own_image=own_image).offers
    return next((offer for offer in offers if offer.strategy == tier.strategy), None)


def cost_lines(jobs: Iterable[Job]) -> list[str]:
    """Returns what the kept plan of each job estimates, with a warning if that is more than where it is stopped."""
    lines = dict[str, None]()
    for job in jobs:
        tier, offer = job.tier, estimate(job)
        if offer and tier.most_usd is not None:
            usd, hours, most = offer.usd, offer.hours, job.order.asked.max_cost
            line = (
                f"its plan estimates {usd.middle:.2f} USD ({usd.low:.2f} - {usd.high:.2f}) as "
                f"{STRATEGIES[tier.strategy]}, {figures(hours.middle)} hours ({figures(hours.low)} - "
                f"{figures(hours.high)})"
            )
            if usd.middle > tier.most_usd:
                second = offer.usd_per_hour / 3600
                limit = "--max_cost" if most is not None and tier.most_usd > most - second else "--timeout"
                stopped = f"and the job is stopped at {tier.most_usd:.2f} USD: raise {limit}, or train fewer steps"
                line = f"warning: {line}, {stopped}"
            lines[f"{tier.name}: {line}"] = None
    return [*lines]


def estimate(job: Job) -> PricedEstimate | None:
    """Returns what the kept plan estimates of the job; None without a plan or a price."""
    work, tier = job.workload, job.tier
    if job.order.asked.check or not isinstance(work, Training) or tier.most_usd is None:
        return None
    return _estimated(tier, work.config, own_image=not job.image.plain)


def planned_usd(jobs: Iterable[Job]) -> list[tuple[float, float] | None]:
    """Returns the least and the most USD of each job by its plan, as `cost_confirmation` takes them."""
    return [(offer.usd.low, offer.usd.high) if (offer := estimate(job)) else None for job in jobs]


def with_limits(work: Workload, order: Order) -> Order:
    """Returns the order of a job that takes along the limits at which it ends itself; those of a check as they are.

    Raises UserError for idle GPUs where there are none or nobody sees all, and for a limit by a plan without one.
    """
    if order.asked.check:
        return order
    tier, factor, hours = work.tier, order.asked.stop_if_over, 0.0
    training = work if isinstance(work, Training) else None
    refuse(
        (
            order.asked.stop_if_idle and not tier.accelerators,
            f"--stop_if_idle is for GPUs, and {tier.name} has none: leave it out",
        ),
        (
            order.asked.stop_if_idle and training is None and tier.workers > 1,
            "--stop_if_idle is for a script on one machine: the workers of a script do not see each other",
        ),
    )
    if factor:
        if training and order.asked.plan:
            plan_of(training.config, training.overrides)
        offer = training and _estimated(tier, training.config)
        if not offer:
            instead = "--plan makes one" if training else "a script has none: use --max_cost"
            raise UserError(f"stop_if_over={factor:g}: there is no plan of the time on {tier.name}: {instead}")
        hours = min(offer.hours.high, offer.usd.high / offer.usd_per_hour)
    return replace(order, limits=StopLimits(order.asked.stop_if_idle, factor * hours * 3600, factor).text)


def memory_lines(works: Iterable[Workload], *, plan: bool, force: bool) -> list[str]:
    """Returns what the kept plans say of each tier's memory, or that nobody looked; alike tiers in one line.

    Nothing of a script: what it does is not known.

    plan: makes a plan that is missing first. Raises UserError if a run cannot fit, by more than the error of the
    prediction, unless `force`.
    """
    tiers: dict[str, list[str]] = {}
    for training in (work for work in works if isinstance(work, Training)):
        tier = training.tier
        if plan:
            plan_of(training.config, training.overrides)
        known = _kept(training.config)
        fit = fit_on(known, training.config, tier, load_machines()) if known else None
        if fit:
            line = {NEAR: "warning: may not fit the memory: ", FITS: "fits the memory: "}.get(fit.verdict, "")
            line += f"it {fit.words}"
        else:
            missing = "that of its devices is not in the table of machines"
            why = missing if known else "--plan measures it (some steps on this CPU)"
            line = f"whether it fits the memory is not known: {why}"
        cannot = fit is not None and fit.verdict == TOO_LARGE
        if cannot and not force:
            raise UserError(f"{tier.name}: the run does not fit its memory: {line}: --force sends it anyway")
        tiers.setdefault(f"warning: does not fit the memory: {line}" if cannot else line, []).append(tier.name)
    return [f"{', '.join(dict.fromkeys(names))}: {line}" for line, names in tiers.items()]
