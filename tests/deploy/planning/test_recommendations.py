"""Tests that a plan answers first what users ask, on few lines."""

import re
from dataclasses import replace
from typing import Any

import pytest

from deploy.api.plan import LINES, WIDTH, Plan
from deploy.planning.forecast import PricedEstimate, forecast
from deploy.planning.step_time import Interval
from deploy.report.formatting import span
from deploy.tiers.tier import load_tier, tier_names
from tests.deploy.planted import planted_plan
from trainer.base.run_files.plan_file import CpuSteps, LinearInRows, StepPlan, read_plan
from trainer.base.settings.train_config import TrainConfig

FIRST = 6  # lines, in which each question is answered


def answered(
    plan: StepPlan, *tiers: str, within: float | None = None, **settings: Any
) -> list[str]:
    """Returns the lines of the plan of these tiers, by default of all."""
    config = TrainConfig(model="mine:build", data="mine:data", **settings)
    forecasts = [forecast(load_tier(name), plan, config) for name in tiers or tier_names()]
    lines = str(Plan(plan, forecasts, "mine on mine", [], within)).splitlines()
    assert len(lines) <= LINES
    assert all(len(line) <= WIDTH and not line.endswith("…") for line in lines)
    return lines


def line_of(question: str, lines: list[str]) -> str:
    """Returns the answer to a question, which is among the first lines."""
    return next(line for line in lines[:FIRST] if line.startswith(f"  {question} "))


def test_the_cheapest_within_a_time_and_whether_four_gpus_are_worth_it() -> None:
    plan = read_plan(planted_plan(gflop=10.0))
    for hours, way in ((2, "spot"), (6, "flex-start")):  # which may wait for 4 h
        lines = answered(plan, "h100x1", within=hours, steps=20_000)
        assert f"  h100x1 {way} " in line_of(f"within {hours} h", lines)
    every = answered(read_plan(planted_plan()), global_batch_size=32, steps=50_000)
    for question in ("cheapest", "fastest", "4 GPUs?", "the time"):
        line_of(question, every)
    four = line_of("4 GPUs?", answered(plan, "l4x1", "l4x4", steps=20_000))
    assert re.search(r" l4x4 is \S+ x as fast as l4x1 for ", four)


def test_a_plan_says_that_a_cpu_is_fast_enough() -> None:
    plan = replace(read_plan(planted_plan()), cpu=CpuSteps(LinearInRows(0.001, 0.0), 2))
    small = answered(plan, "cpu", "l4x1", "l4x4", steps=20_000)
    assert " no, a CPU is fast enough: l4x" in line_of("GPUs?", small)
    assert not any(line.startswith("  4 GPUs?") for line in small)


def test_a_tier_that_surely_fits_goes_before_a_cheaper_one_that_may_not() -> None:
    plan = read_plan(planted_plan(row_gib=0.1))
    config = TrainConfig(model="mine:build", data="mine:data", steps=1000, global_batch_size=180)
    of = {name: forecast(load_tier(name), plan, config) for name in ("l4x1", "a100x1")}
    both = Plan(plan, [*of.values()], "mine", []).sentences()
    alone = Plan(plan, [of["l4x1"]], "mine", [])
    assert any(line.startswith("cheapest: a100x1 ") for line in both)
    assert any(re.match(r"cheapest: l4x1 \S+ if it fits ", line) for line in alone.sentences())
    assert alone.best().tier == "l4x1"


@pytest.mark.parametrize(
    ("tiers", "line"),
    [
        (("l4x1", "t4x1"), r"16 bits: \S+ USD \(.*\) on l4x1, .*, by --precision=mixed_bfloat16"),
        (("l4x1", "h100x1"), r"the time: .*"),  # the cheapest tier stays the same
    ],
)
def test_a_precision_that_makes_another_tier_the_cheapest_is_a_line(
    tiers: tuple[str, ...], line: str
) -> None:
    plan = read_plan(planted_plan())
    float32, half = (
        [
            forecast(
                load_tier(tier),
                plan,
                TrainConfig(steps=20_000, global_batch_size=32, precision=precision),
            )
            for tier in tiers
        ]
        for precision in ("float32", "mixed_bfloat16")
    )
    _, _, third, *_ = Plan(plan, float32, "", [], in_bfloat16=half).sentences()
    assert re.fullmatch(line, third)


def test_a_model_with_loops_has_times_on_cpus_alone_and_the_answer_says_so() -> None:
    plan = replace(read_plan(planted_plan()), own_loops=True)
    lines = answered(plan, global_batch_size=32, steps=500)
    assert " cpu " in line_of("cheapest", lines)
    assert line_of("not timed", lines).endswith(
        f"{len(tier_names()) - 2} tiers: no time: loops, such as an LSTM's, run other kernels on"
        " GPUs: use --measure"
    )


def test_the_fastest_is_one_tier_by_what_differs_and_the_cheaper_of_equal_ones() -> None:
    """Their intervals overlap, as the error of a graph is the same on all tiers."""
    plan = read_plan(planted_plan())
    choices = []
    jobs = (
        ("l4x1", Interval(4, 5, 6), 0.25),
        ("l4x2", Interval(0.6, 1.04, 1.4), 4.0),
        ("l4x4", Interval(0.5, 1.0, 1.5), 8.0),
        ("l4x8", Interval(0.5, 1.2, 1.5), 1.0),
    )
    for name, hours, usd in jobs:
        tier = forecast(load_tier(name), plan, TrainConfig(steps=1000))
        choices.append((tier, PricedEstimate("STANDARD", usd, hours, hours.times(usd))))
    for limit, answer in (
        (1.3, "for 1.30 USD: perhaps l4x8 standard 1.20 USD (0.50 - 1.50) 72 min (30 - 90)"),
        (1.1, "for 1.10 USD: unlikely l4x8 standard 1.20 USD (0.50 - 1.50) 72 min (30 - 90)"),
        (0.4, "for 0.40 USD: none: the cheapest costs at least 0.50 USD"),
    ):
        table = Plan(plan, [], "", [], budget_usd=limit)
        table.__dict__["offers"] = choices
        budget, cheapest, fastest, *_ = table.sentences()
        assert budget == answer
    assert cheapest.startswith("cheapest: l4x8 standard 1.20 USD")
    assert fastest.startswith("fastest: l4x2 standard 4.16 USD (2.40 - 5.60)")


@pytest.mark.parametrize(
    ("hours", "words"), [(0.01, "36 s"), (0.1, "6 min"), (3.5, "3.5 h"), (240, "10 days")]
)
def test_times_are_said_as_people_say_them(hours: float, words: str) -> None:
    assert span(hours) == words
