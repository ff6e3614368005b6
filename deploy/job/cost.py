"""Computes what a job costs: per hour, at most, and up to now."""

from contextlib import suppress
from functools import partial

from deploy.platform.api import JobStatus
from deploy.tiers.machine_table import load_machines
from deploy.tiers.tier import PRICE_LABEL, Tier
from trainer.base.log import duration

format_duration = partial(duration, hours_always=True)


def price_and_limit(tier: Tier) -> str:
    """Describes the hourly price, the highest cost and the timeout of a job on `tier`."""
    limit = f"until its timeout of {format_duration(tier.timeout_s)}"
    if tier.price_per_hour is None:
        bound = tier.price.under(tier.strategy)
        least = f" (at least {bound:.2f} USD an hour, and Vertex AI's fee, which is not known)" if bound else ""
        return f"the {tier.price_name} of {tier.machine} is not known{least} (--prices=FILE); it runs {limit} at most"
    table = load_machines()
    estimate = f" (estimate of {table.date} for {table.region})" if tier.price.inferred else ""
    hourly, most = f"{tier.price_per_hour:.2f} USD an hour{estimate}", f"{tier.most_usd:.2f} USD"
    return f"{hourly}, {most} at most, {limit}"


def time_and_cost(status: JobStatus, usd_per_hour: float | None, now: float) -> tuple[float, float | None]:
    """Returns the seconds for which the job's machines have run, and their cost in USD; None without a price."""
    ran = max((status.ended or now) - status.started, 0.0) if status.started else 0.0
    return ran, None if usd_per_hour is None else ran / 3600 * usd_per_hour


def usd_per_hour(status: JobStatus) -> float | None:
    """Returns the price in the label of a job; None without one."""
    with suppress(ValueError):
        return float(status.labels.get(PRICE_LABEL, "").replace("-", "."))
    return None


def describe_run(status: JobStatus, now: float) -> tuple[str, str]:
    """Returns run time and cost of the job's machines as texts; the cost is empty if the job has no price label."""
    ran, usd = time_and_cost(status, usd_per_hour(status), now)
    return format_duration(ran), "" if usd is None else f"{usd:.2f} USD"
