"""Turns the time of a job into hours and USD under each of Vertex AI's scheduling strategies."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deploy.planning.interval import Interval
from deploy.tiers.machine_table import Machines, Price, load_machines
from deploy.tiers.spec_rules import FLEX_START
from deploy.tiers.tier import Tier

STRATEGIES = {"STANDARD": "standard", "SPOT": "spot", "FLEX_START": "flex-start"}  # with their names in words
PREEMPTIONS_PER_HOUR = 0.05  # assumed of each spot machine; none in the best case, twice as many in the worst
RESTART_SECONDS = 600.0  # assumed: new machines, the container and the start of the trainer, after a preemption


@dataclass(frozen=True)
class Offer:
    """Holds the whole job on a tier under a strategy: hours, and USD for all machines."""

    strategy: str
    usd_per_hour: float
    hours: Interval
    usd: Interval


def offers(tier: Tier, table: Machines, seconds: Interval, lost_seconds: float) -> Iterator[Offer]:
    """Yields the offers that have a price and an end.

    seconds: of the job without interruption; lost_seconds: of work, by one preemption of a spot machine. Each machine
    of the tier is preempted on its own, and ends the work of all.
    """
    for strategy, price in prices(tier, table).items():
        share = 0.0
        if strategy == "SPOT":
            share = PREEMPTIONS_PER_HOUR * tier.workers * (lost_seconds + RESTART_SECONDS) / 3600
        if 2 * share >= 1:
            continue  # more may be lost than is done
        longer = Interval(1.0, 1 / (1 - share), 1 / (1 - 2 * share))
        hours = seconds.product(longer).times(1 / 3600)
        yield Offer(strategy, price, hours, hours.times(price))


def prices(tier: Tier, table: Machines) -> dict[str, float]:
    """Returns USD an hour of all machines of the tier, by strategy; only those that its machines are offered under.

    A price that the user gave for the tier is that of its own strategy.
    """
    by_strategy = _by_strategy(tier, table, [pool.price for pool in tier.pools])
    if tier.price_per_hour is not None:
        by_strategy[tier.strategy] = tier.price_per_hour
    return by_strategy


def not_priced(tier: Tier, table: Machines) -> Iterator[str]:
    """Yields under which strategies the tier's machines are offered without a known price; of the user's own, why."""
    listed, priced = load_machines(), prices(tier, table)
    unit = [listed.price(pool.machine_type, pool.accelerator_type, pool.accelerators) for pool in tier.pools]
    missing = [strategy for strategy in _offered(tier, table) if strategy not in priced]
    own = [STRATEGIES[strategy] for strategy in missing if None not in {price.under(strategy) for price in unit}]
    unknown = [STRATEGIES[strategy] for strategy in missing if STRATEGIES[strategy] not in own]
    if own and priced:
        named = " and ".join(STRATEGIES[strategy] for strategy in priced)
        yield (f"your own price is for {named} alone, and the table's for {' and '.join(own)} is not mixed with it:"
               " give all in --prices=FILE, as g2-standard-48: {list: 4.60, spot: 2.35}")  # fmt: skip
    if unknown and priced:
        yield f"no price known as {' or '.join(unknown)}"


def _offered(tier: Tier, table: Machines) -> Iterator[str]:
    """Yields the strategies under which the tier's machines are offered."""
    machine = table.machines.get(tier.machine_type)
    for strategy in (machine.strategies if machine else ()) or STRATEGIES:
        if strategy != "FLEX_START" or FLEX_START.fullmatch(tier.accelerator_type):
            yield strategy


def _by_strategy(tier: Tier, table: Machines, unit: Sequence[Price]) -> dict[str, float]:
    """Returns USD an hour of all machines by strategy. `unit`: the price of one machine of every pool."""
    by_strategy = {}
    for strategy in _offered(tier, table):
        usd = [price.under(strategy) for price in unit]
        if None not in usd:
            by_strategy[strategy] = sum(
                (price or 0) * pool.replicas for price, pool in zip(usd, tier.pools, strict=True)
            )
    return by_strategy


def lost_by_preemption(step_seconds: float, every_steps: int, every_minutes: float, job_seconds: float) -> float:
    """Returns the seconds of work that a preemption loses on average: half of the time between two checkpoints.

    every_steps, every_minutes: how often one is saved; 0: not by these.
    """
    return min(filter(None, [every_steps * step_seconds, 60 * every_minutes, job_seconds])) / 2
