"""What a job costs: an hour, at most, and until now."""

from functools import partial

from deploy.spec.machine_table import load_machines
from deploy.spec.tier import Tier
from deploy.vertex.api import PRICE_LABEL, JobStatus
from trainer import terminal

duration = partial(terminal.duration, hours_always=True)


def price_and_limit(tier: Tier) -> str:
    """What a job on `tier` costs an hour and at most, and when it is ended."""
    limit = f"until its timeout of {duration(tier.timeout_s)}"
    if tier.price_per_hour is None:
        return f"the price of this tier is not known (--prices=FILE); it runs {limit} at most"
    table = load_machines()
    estimate = f" (estimate of {table.date} for {table.region})" if tier.price_inferred else ""
    return f"{tier.price_per_hour:.2f} USD an hour{estimate}, {tier.most_usd:.2f} USD at most, {limit}"


def spent(status: JobStatus, usd_per_hour: float | None, now: float) -> tuple[float, float | None]:
    """Seconds that the job's machines ran until `now`, and USD; None where the price is not known."""
    ran = max((status.ended or now) - status.started, 0.0) if status.started else 0.0
    return ran, None if usd_per_hour is None else ran / 3600 * usd_per_hour


def price_of(status: JobStatus) -> float | None:
    """USD an hour, as the label that `submit` gave the job says."""
    try:
        return float(status.labels.get(PRICE_LABEL, "").replace("-", "."))
    except ValueError:
        return None
