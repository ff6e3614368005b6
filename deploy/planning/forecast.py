"""Puts together what is known of a run on each tier: whether it fits, the time of a step and of the job, the money."""

from collections.abc import Iterator
from dataclasses import dataclass

from deploy.packaging.images import choose_image, install_seconds
from deploy.planning.extrapolation import Extrapolation
from deploy.planning.step_time import Interval, cpu_step_seconds, is_compiled, step_seconds
from deploy.planning.tier_memory import TOO_LARGE, Fit, fit_on, host_problems
from deploy.tiers.machine_table import Machines
from deploy.tiers.tier import STRATEGIES, Tier
from trainer.base.errors import UserError
from trainer.base.run_files.plan_file import StepPlan
from trainer.base.settings.accelerators import arithmetic
from trainer.base.settings.train_config import TrainConfig

# Guesses, with what they may be off: from the start of the process to the first step; the installation of TensorFlow in
# a plain image, as a factor of images.py's guess.
START_SECONDS = Interval(30.0, 60.0, 180.0)
INSTALL_DOUBT = Interval(0.5, 1.0, 2.5)
PREEMPTIONS_PER_HOUR = 0.05  # assumed of each spot machine; none in the best case, twice as many in the worst
RESTART_SECONDS = 600.0  # assumed: new machines, the container and the start of the trainer, after a preemption
BY_GRAPH, BY_CPU, BY_RUNS = "graph", "cpu", "runs"


@dataclass(frozen=True)
class PricedEstimate:
    """Holds the whole job on a tier under a strategy: hours, and USD for all machines."""

    strategy: str
    usd_per_hour: float
    hours: Interval
    usd: Interval


@dataclass(frozen=True)
class Forecast:
    """Holds the forecast of a tier. `problems`: why a number is missing or the run cannot work, one line each."""

    tier: str
    strategy: str  # of its file
    kind: str  # of its devices, or of its machine if that has none
    machine: str
    devices: int
    batch_per_device: int | None
    fit: Fit | None
    step: Interval | None  # seconds
    seconds: Interval | None  # of the whole job, without installation and preemptions
    install_seconds: Interval  # before it, in a plain Python image; 0 in another
    steps: int
    basis: str  # BY_GRAPH, BY_CPU: steps where the plan was made, BY_RUNS; "" without times
    measured: str  # the tiers whose runs tell the times, of BY_RUNS
    compiled: bool  # whether XLA is expected to compile the steps
    offers: tuple[PricedEstimate, ...]
    problems: tuple[str, ...]

    def __repr__(self) -> str:
        return f"<forecast of {self.tier}: {self.fit.verdict if self.fit else 'memory not known'}>"


def forecast(
    tier: Tier, plan: StepPlan, config: TrainConfig, table: Machines, extrapolation: Extrapolation | None = None, *,
    own_image: bool = False,
) -> Forecast:  # fmt: skip
    """Returns the forecast of a tier, whose times come from the graph unless runs tell them by `extrapolation`.

    own_image: nothing is installed when a job starts, also where the tier's file names no image.
    """
    rows, problems, steps = None, [], plan.total_steps(config)
    try:
        rows = config.rows_per_replica(tier.devices)
    except UserError as error:
        problems.append(str(error))
    fit = fit_on(plan, config, tier, table) if rows else None
    too_large = fit is not None and fit.verdict == TOO_LARGE
    if rows and fit is None:
        problems.append("the memory of its devices is not in the table of machines")
    if fit and too_large:
        problems.append(f"does not fit: {fit.words}")
    problems += host_problems(plan, tier, table)
    step, seconds, basis = None, None, ""
    if extrapolation:
        seconds, step, basis = extrapolation.seconds, extrapolation.step, BY_RUNS
    elif rows:
        gpu, machine = table.accelerators.get(tier.accelerator_type), table.machines.get(tier.machine_type)
        if gpu is None:
            if machine and not tier.accelerators and (step := cpu_step_seconds(plan, config, machine, tier.workers)):
                seconds, basis = step.times(steps).plus(START_SECONDS), BY_CPU
            else:
                problems.append(f"no time of {tier.kind} at precision={config.precision}: give a run with --from=")
        elif plan.own_loops:
            problems.append("no time: loops, as of an LSTM, are other kernels on GPUs: --measure tells")
        elif gpu.rates is None:
            problems.append(f"no rates of {gpu.name} in the table of machines: give a run on it with --from=")
        elif not arithmetic(config, gpu.rates.tflops):
            problems.append(f"no rate for precision={config.precision}: give a run on it with --from=")
        elif step := step_seconds(plan, config, gpu, tier.devices, tier.workers):
            seconds, basis = step.times(steps).plus(START_SECONDS), BY_GRAPH
        else:
            problems.append("no time: its step could not be traced on two replicas (python -m trainer.plan says why)")
    plain = not own_image and choose_image(tier, "", None, ()).plain
    installing = INSTALL_DOUBT.times(install_seconds(tier.accelerators) if plain else 0.0)
    offered: list[PricedEstimate] = []
    if step and seconds and not too_large:
        lost = lost_by_preemption(
            step.middle, config.checkpoint_every_steps, config.checkpoint_every_minutes, seconds.middle
        )
        offered = list(priced_estimates(tier, seconds.plus(installing), lost))
        usd = tier.usd_by_strategy
        unknown = [STRATEGIES[strategy] for strategy in usd if usd[strategy] is None]
        if not offered:
            problems.append(f"no price: give --price_per_hour={tier.name}=USD")
        elif usd.get("SPOT") is not None and "SPOT" not in {offer.strategy for offer in offered}:
            problems.append("as spot, preemptions might lose more than is done")
        if tier.price.lower_bound:
            problems.append("its prices are lower bounds, without Vertex AI's fee, which is not known")
        if unknown and offered:
            problems.append(f"no price known as {' or '.join(unknown)}")
    return Forecast(
        tier.name, tier.strategy, tier.kind, tier.machine, tier.devices, rows, fit, step, seconds, installing, steps,
        basis, extrapolation.measured if extrapolation else "",
        basis == BY_GRAPH and is_compiled(plan, config, tier.devices), tuple(offered),
        tuple(problems),
    )  # fmt: skip


def priced_estimates(tier: Tier, seconds: Interval, lost_seconds: float) -> Iterator[PricedEstimate]:
    """Yields the job under each strategy that has a price and an end.

    seconds: of the job without interruption; lost_seconds: of work, by one preemption of a spot machine. Each machine
    of the tier is preempted on its own, and ends the work of all.
    """
    for strategy, price in tier.usd_by_strategy.items():
        share = 0.0
        if strategy == "SPOT":
            share = PREEMPTIONS_PER_HOUR * tier.workers * (lost_seconds + RESTART_SECONDS) / 3600
        if price is not None and 2 * share < 1:  # else more may be lost than is done
            longer = Interval(1.0, 1 / (1 - share), 1 / (1 - 2 * share))
            hours = seconds.product(longer).times(1 / 3600)
            yield PricedEstimate(strategy, price, hours, hours.times(price))


def lost_by_preemption(step_seconds: float, every_steps: int, every_minutes: float, job_seconds: float) -> float:
    """Returns the seconds of work that a preemption loses on average: half of the time between two checkpoints.

    every_steps, every_minutes: how often one is saved; 0: not by these.
    """
    return min(filter(None, [every_steps * step_seconds, 60 * every_minutes, job_seconds])) / 2
