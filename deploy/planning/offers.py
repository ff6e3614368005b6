"""Turns the time of a job into hours and USD under each of Vertex AI's scheduling strategies."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from deploy.planning.interval import Interval
from deploy.spec.machine_table import Machines
from deploy.spec.tier import Tier

STRATEGIES = ("STANDARD", "SPOT", "FLEX_START")
RESTART_SECONDS = 600.0  # assumed: new machines, the container and the start of the trainer, after a preemption


@dataclass(frozen=True)
class Offer:
    """Holds the whole job on a tier under a strategy: hours, and USD for all machines."""

    strategy: str
    usd_per_hour: float
    hours: Interval
    usd: Interval


def offers(
    tier: Tier, table: Machines, seconds: Interval, lost_seconds: float, preemptions_per_hour: float
) -> Iterator[Offer]:
    """Yields the offers that have a price and an end.

    seconds: of the job without interruption; lost_seconds: of work, by one preemption of a spot machine. Each machine
    of the tier is preempted on its own, and ends the work of all.
    """
    for strategy, price in prices(tier, table).items():
        share = 0.0
        if strategy == "SPOT":
            share = preemptions_per_hour * tier.workers * (lost_seconds + RESTART_SECONDS) / 3600
        if share >= 1:
            continue  # more is lost than is done
        hours = Interval(seconds.low, seconds.middle / (1 - share), seconds.high / (1 - share)).times(1 / 3600)
        yield Offer(strategy, price, hours, hours.times(price))


def prices(tier: Tier, table: Machines) -> dict[str, float]:
    """Returns USD an hour of all machines of the tier, by strategy; only those that its machines are offered under.

    A price that the user gave for the tier is that of its own strategy.
    """
    machine = table.machines.get(tier.machine_type)
    allowed = (machine.strategies if machine else ()) or STRATEGIES
    found = {}
    for strategy in STRATEGIES:
        each = [(pool.price.under(strategy), pool.replicas) for pool in tier.pools]
        total = [price * count for price, count in each if price is not None]
        if strategy in allowed and len(total) == len(each):
            found[strategy] = sum(total)
    if tier.price_per_hour is not None:
        found[tier.strategy] = tier.price_per_hour
    return found


def lost_by_preemption(step_seconds: float, checkpoint_every_steps: int, job_seconds: float) -> float:
    """Returns the seconds of work that a preemption loses on average: half of the time between two checkpoints."""
    between = checkpoint_every_steps * step_seconds if checkpoint_every_steps else math.inf
    return min(between, job_seconds) / 2
