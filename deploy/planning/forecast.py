"""Forecasts a run on a tier: whether it fits the memory, the time of a step and of the whole job,
and its cost."""

from collections.abc import Iterator
from dataclasses import dataclass

from deploy.packaging.image_choice import install_seconds
from deploy.planning.extrapolation import Extrapolation
from deploy.planning.step_time import Interval, cpu_step_seconds, is_compiled, step_seconds
from deploy.planning.tier_memory import TOO_LARGE, Fit, fit_on, host_problems
from deploy.tiers.machine_table import load_machines
from deploy.tiers.tier import FLEX_WAIT_S, STRATEGIES, Tier
from trainer.base.errors import UserError
from trainer.base.run_files.plan_file import StepPlan
from trainer.base.settings.train_config import TrainConfig

# a guess: from the start of the process to the first step
START_SECONDS = Interval(30.0, 60.0, 180.0)
# factors of the guess in image_choice.py of how long TensorFlow's installation takes
INSTALL_DOUBT = Interval(0.5, 1.0, 2.5)
# assumed for each spot machine; none in the best case, twice as many in the worst
PREEMPTIONS_PER_HOUR = 0.05
# assumed for a preemption: to get new machines, and to start the container and the trainer
RESTART_SECONDS = 600.0
# what a step's time was predicted from
BY_GRAPH = "graph"
BY_CPU = "cpu"
BY_RUNS = "runs"


@dataclass(frozen=True)
class PricedEstimate:
    """Holds the hours and the cost in USD of a whole job, on all its machines, under one scheduling
    strategy."""

    strategy: str
    usd_per_hour: float
    hours: Interval
    usd: Interval

    @property
    def hours_until_end(self) -> Interval:
        """Returns the hours with the wait for machines, as FLEX_START has it, which costs
        nothing."""
        wait = FLEX_WAIT_S / 3600 if self.strategy == "FLEX_START" else 0.0
        return self.hours.plus(Interval(0.0, 0.0, wait))


@dataclass(frozen=True)
class Forecast:
    """Holds the forecast of a tier.

    `problems`: why a number is missing or the run cannot work, one line each.
    """

    tier: str
    strategy: str  # the scheduling strategy that the tier's file names
    kind: str  # the type of its accelerators, or of its machine if that has none
    machine: str
    devices: int
    batch_per_device: int | None
    fit: Fit | None
    step: Interval | None  # seconds of one step
    seconds: Interval | None  # seconds of the whole job, without installation and preemptions
    install_seconds: Interval  # added to these in a plain Python image; 0 in another
    steps: int
    # BY_GRAPH, BY_CPU (steps on the machine that made the plan) or BY_RUNS; "" without times
    basis: str
    measured: str  # for BY_RUNS, the tiers whose runs the times come from
    compiled: bool  # whether XLA is expected to compile the steps
    offers: tuple[PricedEstimate, ...]
    problems: tuple[str, ...]

    def __repr__(self) -> str:
        return f"<forecast of {self.tier}: {self.fit.verdict if self.fit else 'memory not known'}>"


def forecast(
    tier: Tier,
    plan: StepPlan,
    config: TrainConfig,
    extrapolation: Extrapolation | None = None,
    *,
    plain: bool = True,
) -> Forecast:
    """Returns the forecast of a run on a tier.

    Its times come from `extrapolation` if it is given, else from the plan.

    plain: the job's image is a plain Python, in which each start installs the packages.
    """
    rows = None
    problems = []
    steps = plan.total_steps(config)
    try:
        rows = config.rows_per_replica(tier.devices)
    except UserError as error:
        problems.append(str(error))
    # Whether the run fits the memory of the devices, and its data that of the machines.
    fit = fit_on(plan, config, tier) if rows else None
    too_large = fit is not None and fit.verdict == TOO_LARGE
    if rows and fit is None:
        problems.append("the memory of its devices is not in the table of machines")
    if fit and too_large:
        problems.append(f"does not fit: {fit.words}")
    problems += host_problems(plan, tier)
    # The time of a step: from measured runs; else from the plan, by its graph on GPUs, by its
    # measured steps on CPUs.
    step = None
    seconds = None
    basis = ""
    if extrapolation:
        seconds = extrapolation.seconds
        step = extrapolation.step
        basis = BY_RUNS
    elif rows:
        gpu = load_machines().accelerators.get(tier.accelerator_type)
        machine = load_machines().machines.get(tier.machine_type)
        reason = f"no time of {tier.kind} at precision={config.precision}: give a run with --from="
        if gpu and plan.own_loops:
            reason = "no time: loops, such as an LSTM's, run other kernels on GPUs: use --measure"
        elif tier.devices > 1 and plan.work_of_two is None:
            reason = (
                "no time: its step could not be traced on two replicas (python -m trainer.plan says"
                " why)"
            )
        elif gpu:
            step = step_seconds(plan, config, gpu, tier.devices, tier.workers)
        elif machine:
            step = cpu_step_seconds(plan, config, machine, tier.workers)
        if step:
            basis = BY_GRAPH if gpu else BY_CPU
            seconds = step.times(steps).plus(START_SECONDS)
        else:
            problems.append(reason)
    # The hours and the cost under each strategy that has a price.
    installing = INSTALL_DOUBT.times(install_seconds(tier.accelerators) if plain else 0.0)
    estimates: list[PricedEstimate] = []
    if step and seconds and not too_large:
        lost = lost_by_preemption(
            step.middle,
            config.checkpoint_every_steps,
            config.checkpoint_every_minutes,
            seconds.middle,
        )
        estimates = list(priced_estimates(tier, seconds.plus(installing), lost))
        usd = tier.usd_by_strategy
        unknown = [STRATEGIES[strategy] for strategy in usd if usd[strategy] is None]
        estimated = {estimate.strategy for estimate in estimates}
        if usd.get("SPOT") is not None and "SPOT" not in estimated:
            problems.append("as spot, preemptions might lose more than is done")
        elif not estimates:
            problems.append(f"no price: give --price_per_hour={tier.name}=USD")
        if tier.price.lower_bound:
            problems.append(
                "its prices are lower bounds, without Vertex AI's fee, which is not known"
            )
        if tier.resource:
            problems.append(
                f"its USD are those of the persistent resource {tier.resource}, which costs them"
                " with and without this job"
            )
        if unknown and estimates:
            problems.append(f"no price known as {' or '.join(unknown)}")
    return Forecast(
        tier=tier.name,
        strategy=tier.strategy,
        kind=tier.kind,
        machine=tier.machine,
        devices=tier.devices,
        batch_per_device=rows,
        fit=fit,
        step=step,
        seconds=seconds,
        install_seconds=installing,
        steps=steps,
        basis=basis,
        measured=extrapolation.measured if extrapolation else "",
        compiled=basis == BY_GRAPH and is_compiled(plan, config, tier.devices),
        offers=tuple(estimates),
        problems=tuple(problems),
    )


def priced_estimates(
    tier: Tier, seconds: Interval, lost_seconds: float
) -> Iterator[PricedEstimate]:
    """Yields the estimate of a job under each strategy that has a price and under which the job can
    finish.

    seconds: how long the job takes without interruption; lost_seconds: of work that one preemption
        of a spot machine loses. The preemption of any machine of the tier interrupts all of them.
    """
    for strategy, price in tier.usd_by_strategy.items():
        # of all time, by preemptions
        lost_hours = (lost_seconds + RESTART_SECONDS) / 3600
        lost_share = PREEMPTIONS_PER_HOUR * tier.workers * lost_hours * (strategy == "SPOT")
        # otherwise, in the worst case, the job never ends
        if price is not None and 2 * lost_share < 1:
            longer = Interval(1.0, 1 / (1 - lost_share), 1 / (1 - 2 * lost_share))
            hours = seconds.product(longer).times(1 / 3600)
            yield PricedEstimate(strategy, price, hours, hours.times(price))


def lost_by_preemption(
    step_seconds: float, every_steps: int, every_minutes: float, job_seconds: float
) -> float:
    """Returns the seconds of work that a preemption loses on average: half of the time between two
    checkpoints.

    every_steps, every_minutes: how often a checkpoint is saved; 0 where this does not trigger one.
    Without either, half of the job is lost.
    """
    return min(filter(None, [every_steps * step_seconds, 60 * every_minutes, job_seconds])) / 2
