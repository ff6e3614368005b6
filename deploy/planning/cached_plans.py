"""Finds or makes the plan of a run's settings, which is kept in the user's cache, and what makes
the run fit."""

from contextlib import suppress

from deploy.base.console import run_program, say, tell
from deploy.planning.tier_memory import TOO_LARGE, MemoryOption, fit_on
from deploy.tiers.tier import Tier
from trainer.base.errors import UserError
from trainer.base.run_files.plan_file import StepPlan, kept_plan, read_plan
from trainer.base.settings.request import Overrides
from trainer.base.settings.train_config import TrainConfig

FIT = (
    "if the run may not fit, add what makes it fit: --micro_batches, else"
    " --precision=mixed_bfloat16"
)


def plan_of(config: TrainConfig, overrides: Overrides) -> StepPlan:
    """Returns the cached plan for these settings; if there is none, another process makes it
    now."""
    plan = cached_plan(config)
    if not plan:
        tell("measures steps on this machine's CPU, once for these settings …")
        flags = overrides.without("job_dir", "expect_devices").arguments()
        run_program(
            "trainer.plan", flags, lambda line: None if line.startswith("error: ") else tell(line)
        )
    return plan or read_plan(kept_plan(config))


def cached_plan(config: TrainConfig) -> StepPlan | None:
    """Returns the cached plan for these settings; None if there is none, or if its file cannot be
    read.

    A damaged file is made again, not repaired.
    """
    with suppress(UserError):
        return read_plan(kept_plan(config))
    return None


def best_memory_option(tier: Tier, plan: StepPlan, config: TrainConfig) -> MemoryOption | None:
    """Prints and returns the best setting by which a run surely fits the tier's memory (`--fit`).

    Returns None if the run fits as it is, or if no setting makes it fit.
    """
    fit = fit_on(plan, config, tier)
    if not fit or not fit.options:
        return None
    first, *others = map(str, fit.options)
    problem = "does not fit" if fit.verdict == TOO_LARGE else "may not fit"
    say(
        f"# {tier.name}: {problem} as it is: --fit adds"
        f" {first}{', rather than ' * bool(others)}{', '.join(others)}"
    )
    return fit.options[0]
