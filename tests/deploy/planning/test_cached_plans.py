"""Tests that a job is held against its plan before it is sent, takes it along, and is reported
beside it."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from deploy.api.plan import PlanOptions, plan_by_options
from deploy.api.request import parse_verb
from deploy.api.submit import USAGE, SubmitOptions, prepare_submission
from deploy.base.console import run_program
from deploy.planning import cached_plans
from deploy.planning.paid_jobs import estimate
from tests.deploy.conftest import JOB, WHERE, Command
from tests.deploy.planted import content, keep_plan, remember_built
from tests.fixtures import Patch
from trainer.base.errors import PlatformFault
from trainer.base.run_files.plan_file import kept_plan
from trainer.base.settings.request import Overrides

TRAINED = [*(flag for flag in JOB if "batch" not in flag), "--global_batch_size=64"]
L4 = ["submit", "l4x1", *WHERE, *TRAINED, "--dry_run"]


@pytest.fixture
def keep(monkeypatch: Patch) -> Any:
    """Returns a function that keeps a planted plan for the settings of L4."""
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    return partial(keep_plan, TRAINED)


@pytest.mark.parametrize(
    ("row_gib", "line"),
    [
        (None, "l4x1: whether it fits the memory is not known: --plan measures it (some steps on"),
        (0.01, "l4x1: fits the memory: it needs 2.1 - 3.8 of 22.3 GiB; a global batch of 1,"),
        (0.3, "l4x1: warning: may not fit the memory: it needs 19.7 - "),
    ],
)
def test_what_its_plan_says_is_printed(
    row_gib: float | None, line: str, keep: Any, cloud: Any, typed: Command
) -> None:
    if row_gib:
        keep(row_gib=row_gib)
    assert line in typed(*L4)


def test_what_cannot_fit_is_refused_unless_it_is_forced(
    keep: Any, cloud: Any, typed: Command
) -> None:
    keep(row_gib=0.5)
    error = typed(*L4, code=2)
    assert "error: l4x1: the run does not fit its memory: it needs 31.9 - " in error
    assert "--force sends it anyway" in error
    assert "l4x1: the run does not fit its memory" in typed(
        "compare", "l4x1", "--on=vertex", *WHERE, *TRAINED, "--dry_run", code=2
    )
    assert "l4x1: warning: does not fit the memory: it needs 31.9 - " in typed(*L4, "--force")


def test_fit_adds_micro_batches_before_16_bits(keep: Any, cloud: Any, typed: Command) -> None:
    """The plan holds for both. Four micro-batches dispatch four times as many operations."""
    micro = r"--micro_batches=\d \(-\d+\.\d GiB, \+\d+% time; other numbers with batch norm; .*"
    bits = r"--precision=mixed_bfloat16 \(-\d+\.\d GiB, [+-]\d+% time; other numbers, of 16 bits\)"
    for row_gib, flags, line, added in (
        (0.5, [], micro, "--micro_batches=4"),
        (0.35, [], f"{micro}, rather than {bits}", "--micro_batches=2"),
        (0.7, ["--virtual_replicas=2"], bits, "--precision=mixed_bfloat16"),
    ):
        keep(row_gib=row_gib, gflop=0.001)
        for verb in (L4, ["plan", "l4x1", *TRAINED, "--out=plan"]):
            shown = typed(*verb, *flags, "--fit")
            assert re.search(f"l4x1: (does|may) not fit as it is: --fit adds {line}\n", shown)
            assert " fits " in shown
        assert added in typed(*L4[:-1], "--spec", *flags, "--fit")
    (tier,) = content("plan/forecast.json")["tiers"]
    assert tier["fit"]["verdict"] == "fits"
    assert tier["offers"]
    keep(row_gib=0.01)
    assert "--fit adds" not in typed(*L4, "--fit")


def test_a_plan_says_what_the_run_takes_here(keep: Any) -> None:
    """A step of 64 rows took 1 s, and 0.5 s a row; there are four."""
    keep()
    plan = plan_by_options(parse_verb(PlanOptions, ["l4x1", *TRAINED], USAGE))
    assert "here: on this CPU: 2.2 min, 0 USD" in plan.sentences()


@pytest.mark.parametrize("flag", ["", "--spot", "--flex_start"])
@pytest.mark.parametrize("tier", ["cpu", "a100-80x8"])
@pytest.mark.parametrize("image", [[], ["--image=a-docker.pkg.dev/p/r/i:1"]])
@pytest.mark.parametrize("built", ["", "fits", "misfits"])
def test_a_plan_and_a_submission_estimate_the_same(
    built: str, image: list[str], tier: str, flag: str, keep: Any
) -> None:
    keep()
    if built:
        remember_built(**({"mine": "1"} if built == "misfits" else {}))
    where = [tier, *TRAINED, *image]
    strategy = flag[2:].upper() or "STANDARD"
    planned = plan_by_options(parse_verb(PlanOptions, where, USAGE))
    offers = {offer.strategy: offer for _, offer in planned.offers}
    if strategy == "FLEX_START" and tier == "cpu":  # which is refused
        assert strategy not in offers
        return
    command = [*where, *WHERE, "--project=p", *([flag] if flag else [])]
    (job,) = prepare_submission(parse_verb(SubmitOptions, command, USAGE)).jobs
    assert estimate(job) == offers.get(strategy)


@pytest.mark.parametrize("damage", ["{", '{"format": 9, "of": "a later version"}'])
def test_a_damaged_plan_stops_no_job_and_is_made_again(
    damage: str, keep: Any, cloud: Any, monkeypatch: Patch, typed: Command
) -> None:
    keep()
    overrides = Overrides.parse(TRAINED)
    kept_plan(overrides.config).write_text(damage)
    assert "l4x1: whether it fits the memory is not known: --plan measures it" in typed(*L4)
    monkeypatch.setattr(cached_plans, "run_program", lambda *words: keep(row_gib=0.3))
    assert cached_plans.plan_of(overrides.config, overrides).examples
    assert "l4x1: warning: may not fit the memory: " in typed(*L4)


@pytest.mark.parametrize(
    ("end", "told", "code"),
    [
        (
            "os.kill(os.getpid(), 9)",
            "was killed by signal 9 (is the memory too small for this batch?)",
            1,
        ),
        ("sys.exit(3)", "ended with exit code 3: step 5/10", 3),
    ],
)
def test_a_program_that_ends_without_an_error_line_is_told_by_how_it_ended(
    end: str, told: str, code: int
) -> None:
    Path("ending.py").write_text(f"import os, sys\nprint('step 5/10', flush=True)\n{end}\n")
    shown: list[str] = []
    with pytest.raises(PlatformFault) as caught:
        run_program("ending", [], shown.append)
    assert str(caught.value) == f"python -m ending {told}"
    assert caught.value.exit_code == code
    assert shown == ["step 5/10"]


MINE = """
import keras
import numpy as np


def data(config):
    return np.ones((64, 4), "float32"), np.arange(64.0)


class Centred(keras.Model):
    def call(self, x):
        return keras.ops.sum(x, 1) * keras.ops.max(x) * self.weight

    def build(self, shape):
        self.weight = self.add_weight(())


def mixing(config, dataset):
    return compiled(Centred())


def plain(config, dataset):
    return compiled(keras.Sequential([keras.layers.Dense(1)]))


def compiled(model):
    model.compile("sgd", "mse")
    return model
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (
            ["--model=mine:plain"],
            0,
            "proved: every update is what one device with all rows would make",
        ),
        (["--model=mine:mixing"], 2, "Max is over the rows of one replica"),
        (["--model=mine:mixing", "--no_check"], 0, "trains mine:mixing"),
        (["--model=mine:mixing", "--allow_replica_dependence"], 0, "trains mine:mixing"),
        (
            ["--model=mine:plain", "--data=gs://bucket/rows.csv"],
            0,
            "the job proves first that replicas change nothing",
        ),
    ],
)
def test_a_model_is_proved_before_several_gpus_are_paid(
    words: list[str], code: int, line: str, typed: Command
) -> None:
    Path("mine.py").write_text(MINE)
    data = [] if "--data" in " ".join(words) else ["--data=mine:data"]
    flags = [*WHERE, "--project=p", "--max_cost=20", "--package=mine.py", "--dry_run"]
    shown = typed("submit", "l4x4", *words, *data, *flags, code=code)
    assert line in shown
    assert ("proves here" in shown) == (words in (["--model=mine:plain"], ["--model=mine:mixing"]))
