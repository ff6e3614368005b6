"""Computes what a job costs per hour, at most and so far, and whether that needs confirmation."""

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from deploy.base.console import agrees, say
from deploy.job.workload import JobOptions
from deploy.platform.vertex_api import JobStatus
from deploy.tiers.machine_table import load_machines
from deploy.tiers.tier import PRICE_LABEL, Tier
from trainer.base.errors import UserError
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
    return f"{tier.price_per_hour:.2f} USD an hour{estimate}, {tier.most_usd:.2f} USD at most, {limit}"


# In USD. Jobs need confirmation if the upper end of their plan exceeds the first or, without a plan, their cost until
# the timeout exceeds the second.
UNCONFIRMED_PLAN_USD, UNCONFIRMED_TIMEOUT_USD = 50.0, 500.0


class CostConfirmation(NamedTuple):
    """Holds what jobs may cost, as a sentence, and the error if nobody confirms that; "" if nobody has to."""

    text: str
    refusal: str

    def confirm(self) -> None:
        """Prints what the jobs may cost, and asks to confirm it if needed. Raises UserError if nobody does."""
        interactive = "ipykernel" in sys.modules or (sys.stdin and sys.stdin.isatty())
        if self.refusal and not (interactive and agrees(f"{self.text}: submit it?")):
            raise UserError(self.refusal)
        say(f"# {self.text}")

    def lines(self) -> list[str]:
        """Returns a line for a dry run if the jobs would need confirmation."""
        return [f"{self.text}: needs confirmation; refused in non-interactive use"] if self.refusal else []


def cost_confirmation(
    jobs: Sequence[tuple[Tier, int]], plans: Sequence[tuple[float, float] | None], asked: JobOptions,
    *, alternatives: bool, transfer_usd: float = 0.0,
) -> CostConfirmation:  # fmt: skip
    """Returns the cost confirmation for `jobs`, pairs of a tier and the number of its jobs.

    `plans`: for each tier the least and the most USD of one job by its plan, None without one. With `alternatives` only
    one of the jobs is created, and any max_cost makes confirmation unnecessary; otherwise all are created, and max_cost
    does so only if it limits them to UNCONFIRMED_TIMEOUT_USD together. `transfer_usd`: what each job pays, beside its
    plan, for data in another region.
    """
    # Only one of several alternatives is paid for; other jobs all are.
    most: Callable[[Iterable[float]], float] = max if alternatives else sum
    least: Callable[[Iterable[float]], float] = min if alternatives else sum
    counts, max_cost = [count for _, count in jobs], asked.max_cost
    unpriced = [tier for tier, _ in jobs if tier.bound_usd is None]
    limit = most(count * (tier.bound_usd or 0.0) for tier, count in jobs)
    planned = [(count * (plan[0] + transfer_usd), count * (plan[1] + transfer_usd))
               for count, plan in zip(counts, plans, strict=True) if plan]  # fmt: skip
    high, basis = None, "there is no plan"
    if len(planned) == len(jobs):
        low, high = least(low for low, _ in planned), most(high for _, high in planned)
        basis = f"by plan {low:.2f} to {high:.2f} USD (an estimate)"
    subject = "this job" if alternatives or sum(counts) == 1 else f"these {sum(counts)} jobs together"
    text = f"{subject} may cost {limit:.2f} USD until the timeout; {basis}"
    refusal = f"{text}: not submitted: set a limit, such as --max_cost=20"
    if not alternatives:
        refusal = f"{text}: not submitted: set a limit for each, such as --max_cost=20, or send fewer at once: " \
                  f"together {UNCONFIRMED_TIMEOUT_USD:.0f} USD at most"  # fmt: skip
    allowed = max_cost is not None and (alternatives or sum(counts) * max_cost <= UNCONFIRMED_TIMEOUT_USD)
    needs_consent = not allowed and (limit > UNCONFIRMED_TIMEOUT_USD if high is None else high > UNCONFIRMED_PLAN_USD)
    if unpriced:
        unknown = f"the {unpriced[0].price_name} of {unpriced[0].name} is not known"
        advice = f"{unknown}: not submitted: give it, as --prices=FILE"
        text = f"{unknown}; without it {text}" if limit else unknown
        refusal = f"{advice}; without it {refusal}" if needs_consent else advice
        needs_consent = needs_consent or any(tier.accelerators for tier in unpriced)
    return CostConfirmation(text, refusal if needs_consent and not asked.check else "")


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
