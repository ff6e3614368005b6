"""Computes what a job costs per hour, at most and so far, whether that needs confirmation, and what
--max_cost pays."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from deploy.base.console import consents, say
from deploy.job.options import JobOptions
from deploy.platform.vertex_api import JobStatus
from deploy.tiers.machine_table import load_machines
from deploy.tiers.tier import Tier
from trainer.base.errors import UserError
from trainer.base.log import duration

format_duration = partial(duration, hours_always=True)


def price_and_limit(tier: Tier) -> str:
    """Describes the hourly price, the highest cost and the timeout of a job on `tier`."""
    limit = f"until its timeout of {format_duration(tier.timeout_s)}"
    if tier.price_per_hour is None:
        known_part = tier.price.under(tier.strategy)
        minimum = ""
        if known_part:
            fee = "Vertex AI's fee, which is not known"
            minimum = f" (at least {known_part:.2f} USD an hour, and {fee})"
        return (
            f"the {tier.price_name} of {tier.machine} is not known{minimum} (--prices=FILE); it"
            f" runs {limit} at most"
        )
    table = load_machines()
    estimate = f" (estimate of {table.date} for {table.region})" if tier.price.inferred else ""
    hourly = f"{tier.price_per_hour:.2f} USD an hour{estimate}"
    if tier.resource:
        return (
            f"nothing of its own: the persistent resource {tier.resource} costs {hourly} for as"
            f" long as it exists; {limit}"
        )
    return f"{hourly}, {tier.most_usd:.2f} USD at most, {limit}"


START_S = 600  # starting the machines and pulling the image take some minutes


def paid_seconds(max_cost: float, tier: Tier, region: str) -> int:
    """Returns the seconds of `tier` that --max_cost pays for, in USD: the job's timeout.

    Raises UserError if no job can start for that, or if the price in the region is not known.
    """
    table = load_machines()
    if tier.price.inferred and region != table.region:
        raise UserError(
            f"max_cost={max_cost:g}: the prices of {region} are not known, those of {table.region}"
            f" may be lower: `python -m deploy prices --region={region}` asks Google and writes a"
            " file for --prices=; or leave out --max_cost and give --timeout"
        )
    hourly = tier.bound_per_hour  # by the list price where the spot price is not known
    if hourly is None:
        raise UserError(
            f"max_cost={max_cost:g}: the {tier.price_name} of {tier.name} is not known: give it"
            " with --prices=FILE"
        )
    seconds = math.floor(max_cost / hourly * 3600)
    if seconds < START_S:
        raise UserError(
            f"max_cost={max_cost:g} pays for {seconds} s of {tier.name} ({hourly:.2f} USD an hour),"
            f" and a job takes minutes to start: give {hourly * START_S / 3600:.2f} or more, or use"
            " a cheaper tier"
        )
    return seconds


# In USD. Jobs need confirmation if the upper end of their plan exceeds the first or, without a
# plan, their cost until the timeout exceeds the second.
UNCONFIRMED_PLAN_USD = 50.0
UNCONFIRMED_TIMEOUT_USD = 500.0


class CostConfirmation(NamedTuple):
    """Holds a sentence on what jobs may cost, and the error if nobody confirms it.

    The error is "" if nobody has to.
    """

    text: str
    refusal: str

    def confirm(self) -> None:
        """Prints what the jobs may cost, and asks to confirm it if needed.

        Raises UserError if nobody confirms it.
        """
        if self.refusal and not consents(f"{self.text}: submit it?"):
            raise UserError(self.refusal)
        say(f"# {self.text}")

    def lines(self) -> list[str]:
        """Returns a line for a dry run if the jobs would need confirmation."""
        if not self.refusal:
            return []
        return [f"{self.text}: needs confirmation; refused in non-interactive use"]


def cost_confirmation(
    tiers: Sequence[Tier],
    plans: Sequence[tuple[float, float] | None],
    options: JobOptions,
    *,
    alternatives: bool,
    transfer_usd: float = 0.0,
) -> CostConfirmation:
    """Returns the cost confirmation for jobs on these tiers.

    `plans`: for each job the least and the most USD by its plan, None without one. With
        `alternatives` only one of the jobs is created, and any max_cost makes confirmation
        unnecessary; otherwise all are created, and max_cost does so only if it limits them to
        UNCONFIRMED_TIMEOUT_USD together. `transfer_usd`: what each job pays, beside its plan, for
        data in another region.
    """
    # Only one of several alternatives is paid for; other jobs all are.
    upper_end: Callable[[Iterable[float]], float] = max if alternatives else sum
    lower_end: Callable[[Iterable[float]], float] = min if alternatives else sum
    count = 1 if alternatives else len(tiers)
    unpriced = [tier for tier in tiers if tier.bound_usd is None]
    limit = upper_end((tier.bound_usd or 0.0) + transfer_usd for tier in tiers)
    planned = [plan for plan in plans if plan]
    high = None
    basis = "there is no plan"
    if len(planned) == len(tiers):
        low = lower_end(low + transfer_usd for low, _ in planned)
        high = upper_end(high + transfer_usd for _, high in planned)
        basis = f"by plan {low:.2f} to {high:.2f} USD (an estimate)"
    subject = "this job" if count == 1 else f"these {count} jobs together"
    text = f"{subject} may cost {limit:.2f} USD until the timeout; {basis}"
    refusal = f"{text}: not submitted: set a limit, such as --max_cost=20"
    if count > 1:
        refusal = (
            f"{text}: not submitted: set a limit for each, such as --max_cost=20, or send fewer at"
            f" once: together {UNCONFIRMED_TIMEOUT_USD:.0f} USD at most"
        )
    # A limit of the user's is a consent; without one a job that may cost much needs it.
    allowed = options.max_cost is not None and (
        alternatives or count * options.max_cost <= UNCONFIRMED_TIMEOUT_USD
    )
    needs_consent = not allowed and (
        limit > UNCONFIRMED_TIMEOUT_USD if high is None else high > UNCONFIRMED_PLAN_USD
    )
    # A tier without a known price needs a confirmation if it has GPUs.
    if unpriced:
        unknown = f"the {unpriced[0].price_name} of {unpriced[0].name} is not known"
        advice = f"{unknown}: not submitted: give it, as --prices=FILE"
        text = f"{unknown}; without it {text}" if limit else unknown
        refusal = f"{advice}; without it {refusal}" if needs_consent else advice
        needs_consent = needs_consent or any(tier.accelerators for tier in unpriced)
    # A job of --check runs for some minutes alone.
    return CostConfirmation(text, refusal if needs_consent and not options.check else "")


def describe_run(status: JobStatus, now: float) -> tuple[str, str]:
    """Returns run time and cost of the job's machines as texts; "" without a price label."""
    usd = status.usd(now)
    return format_duration(status.seconds(now)), "" if usd is None else f"{usd:.2f} USD"
