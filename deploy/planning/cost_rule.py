"""Holds the rule for what may cost much: without --max_cost a command asks on a terminal; elsewhere it is refused."""

import sys
from collections.abc import Callable, Iterable, Sequence

from deploy.planning.interval import Interval
from deploy.planning.kept_plans import estimated_usd
from deploy.planning.strategy_costs import STRATEGIES
from deploy.tiers.job_spec import RenderedJob
from deploy.tiers.output import agrees, say
from deploy.tiers.tier import Tier
from trainer.base.errors import UserError

# In USD. Much is what exceeds the first by the upper end of its plan or, without a plan, the second until its timeout.
PLAN_UNASKED, LIMIT_UNASKED = 50.0, 500.0


def agree_to_cost(
    jobs: Sequence[tuple[RenderedJob, int]], max_cost: float | None, total: Callable[[Iterable[float]], float] = sum,
    *, plan: Interval | None = None, each: bool = False,
) -> None:  # fmt: skip
    """Prints what jobs may cost, so many of each; asks about much. Raises UserError if nobody agrees.

    See `_question`.
    """
    text, refusal = _question(jobs, max_cost, total, plan, each)
    if refusal and not agrees_to_pay(text):
        raise UserError(refusal)
    say(f"# {text}")


def dry_run_lines(
    jobs: Sequence[tuple[RenderedJob, int]], max_cost: float | None, total: Callable[[Iterable[float]], float] = sum,
    *, plan: Interval | None = None, each: bool = False,
) -> list[str]:  # fmt: skip
    """Returns a line if `agree_to_cost` would ask about these jobs."""
    text, refusal = _question(jobs, max_cost, total, plan, each)
    return [f"{text}: it is asked about, and refused where nobody answers"] if refusal else []


def _question(
    jobs: Sequence[tuple[RenderedJob, int]], max_cost: float | None, total: Callable[[Iterable[float]], float],
    plan: Interval | None, each: bool,
) -> tuple[str, str]:  # fmt: skip
    """Returns what jobs may cost, and the refusal if nobody agrees to pay it, empty if nobody is asked.

    max_cost: USD that the user allowed for all, where nothing is asked, or for `each`, where nothing is asked if their
    sum is not much either; total: `max` for jobs of which only one is created; plan: USD, if no kept plan says it.
    """
    limits, plans = [_most_usd(job.tier) for job, _ in jobs], [plan or estimated_usd(job) for job, _ in jobs]
    unpriced = [job.tier for (job, _), limit in zip(jobs, limits, strict=True) if limit is None]
    counts = [count for _, count in jobs]
    limit = total(count * (usd or 0.0) for count, usd in zip(counts, limits, strict=True))
    highs = [count * usd.high for count, usd in zip(counts, plans, strict=True) if usd]
    high = total(highs) if len(highs) == len(jobs) else None
    known = "there is no plan" if high is None else f"by plan {high:.2f} USD at most"
    subject = "this job" if total is max or sum(counts) == 1 else f"these {sum(counts)} jobs together"
    text = f"{subject} may cost {limit:.2f} USD until the timeout; {known}"
    refusal = f"{text}: not submitted: say what it may cost, as --max_cost=20"
    if each:
        refusal = f"{text}: not submitted: say what each may cost, as --max_cost=20, or send fewer at once: together " \
                  f"{LIMIT_UNASKED:.0f} USD at most"  # fmt: skip
    allowed = max_cost is not None and (not each or sum(counts) * max_cost <= LIMIT_UNASKED)
    much = not allowed and (limit > LIMIT_UNASKED if high is None else high > PLAN_UNASKED)
    if unpriced:
        unknown = f"the price of {unpriced[0].name} is not known"
        advice = f"{unknown}: not submitted: give it, as --prices=FILE"
        text = f"{unknown}; without it {text}" if limit else unknown
        refusal = f"{advice}; without it {refusal}" if much else advice
        much = much or any(tier.accelerators for tier in unpriced)
    return text, refusal if much and not jobs[0][0].options.check else ""


def _most_usd(tier: Tier) -> float | None:
    """Returns the most that a job costs; if the price of its kind is not known, by the dearest of another kind."""
    prices = [price for strategy in STRATEGIES if (price := tier.price.known_under(strategy)) is not None]
    return tier.most_usd or (max(prices) * tier.timeout_s / 3600 if prices else None)


def agrees_to_pay(text: str) -> bool:
    """Returns whether somebody at a terminal wants to pay for it."""
    return bool(sys.stdin and sys.stdin.isatty()) and agrees(f"{text}: submit it?")
