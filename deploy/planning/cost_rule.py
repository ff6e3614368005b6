"""Holds the rule for what may cost much: without --max_cost a command asks on a terminal; elsewhere it is refused."""

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from deploy.job.job import Job
from deploy.planning.kept_plans import estimate
from deploy.planning.strategy_costs import STRATEGIES
from deploy.tiers.output import agrees, say
from deploy.tiers.tier import Tier
from trainer.base.errors import UserError

# In USD. Much is what exceeds the first by the upper end of its plan or, without a plan, the second until its timeout.
PLAN_UNASKED, LIMIT_UNASKED = 50.0, 500.0


class CostQuestion(NamedTuple):
    """Holds what jobs may cost, in a sentence, and the refusal if nobody agrees to pay it; "": nobody is asked."""

    text: str
    refusal: str

    def agree(self) -> None:
        """Prints what the jobs may cost; asks about much. Raises UserError if nobody agrees."""
        if self.refusal and not (sys.stdin and sys.stdin.isatty() and agrees(f"{self.text}: submit it?")):
            raise UserError(self.refusal)
        say(f"# {self.text}")

    def lines(self) -> list[str]:
        """Returns a line for a dry run if somebody would be asked."""
        return [f"{self.text}: it is asked about, and refused where nobody answers"] if self.refusal else []


def cost_question(
    jobs: Sequence[tuple[Job, int]], max_cost: float | None,
    *, alternatives: bool = False, each: bool = False,
) -> CostQuestion:  # fmt: skip
    """Returns what is to be asked about jobs, so many of each.

    max_cost: USD that the user allowed for all, where nothing is asked, or for `each`, where nothing is asked if their
    sum is not much either; alternatives: only one of the jobs is created.
    """
    most: Callable[[Iterable[float]], float] = max if alternatives else sum
    least: Callable[[Iterable[float]], float] = min if alternatives else sum
    limits = [_most_usd(job.tier) for job, _ in jobs]
    plans = [offer.usd if (offer := estimate(job)) else None for job, _ in jobs]
    unpriced = [job.tier for (job, _), limit in zip(jobs, limits, strict=True) if limit is None]
    counts = [count for _, count in jobs]
    limit = most(count * (usd or 0.0) for count, usd in zip(counts, limits, strict=True))
    planned = [usd.times(count) for count, usd in zip(counts, plans, strict=True) if usd]
    high, basis = None, "there is no plan"
    if len(planned) == len(jobs):
        low, high = least(usd.low for usd in planned), most(usd.high for usd in planned)
        basis = f"by plan {low:.2f} to {high:.2f} USD (an estimate)"
    subject = "this job" if alternatives or sum(counts) == 1 else f"these {sum(counts)} jobs together"
    text = f"{subject} may cost {limit:.2f} USD until the timeout; {basis}"
    refusal = f"{text}: not submitted: say what it may cost, as --max_cost=20"
    if each:
        refusal = f"{text}: not submitted: say what each may cost, as --max_cost=20, or send fewer at once: together " \
                  f"{LIMIT_UNASKED:.0f} USD at most"  # fmt: skip
    allowed = max_cost is not None and (not each or sum(counts) * max_cost <= LIMIT_UNASKED)
    much = not allowed and (limit > LIMIT_UNASKED if high is None else high > PLAN_UNASKED)
    if unpriced:
        unknown = f"the {unpriced[0].price_name} of {unpriced[0].name} is not known"
        advice = f"{unknown}: not submitted: give it, as --prices=FILE"
        text = f"{unknown}; without it {text}" if limit else unknown
        refusal = f"{advice}; without it {refusal}" if much else advice
        much = much or any(tier.accelerators for tier in unpriced)
    return CostQuestion(text, refusal if much and not jobs[0][0].options.check else "")


def _most_usd(tier: Tier) -> float | None:
    """Returns the most that a job costs; if the price of its kind is not known, by the dearest of another kind."""
    prices = [price for strategy in STRATEGIES if (price := tier.price.known_under(strategy)) is not None]
    return tier.most_usd or (max(prices) * tier.timeout_s / 3600 if prices else None)
