"""Turns the time of a job into hours and USD under each of Vertex AI's scheduling strategies."""

from collections.abc import Iterator
from dataclasses import dataclass

from deploy.planning.step_time import Interval
from deploy.tiers.tier import Tier

PREEMPTIONS_PER_HOUR = 0.05  # assumed of each spot machine; none in the best case, twice as many in the worst
RESTART_SECONDS = 600.0  # assumed: new machines, the container and the start of the trainer, after a preemption


@dataclass(frozen=True)
class PricedEstimate:
    """Holds the whole job on a tier under a strategy: hours, and USD for all machines."""

    strategy: str
    usd_per_hour: float
    hours: Interval
    usd: Interval


def offers(tier: Tier, seconds: Interval, lost_seconds: float) -> Iterator[PricedEstimate]:
    """Yields the offers that have a price and an end.

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
