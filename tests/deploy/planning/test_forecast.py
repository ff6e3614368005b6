"""Tests what a plan says of each tier: whether it fits, the band of its times, hours and USD, and
what is missing."""

import json
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploy.planning.forecast import (
    PREEMPTIONS_PER_HOUR,
    forecast,
    lost_by_preemption,
    priced_estimates,
)
from deploy.planning.step_time import (
    CONSTANTS,
    Interval,
    all_reduce_seconds,
    cpu_step_seconds,
    device_seconds,
    is_compiled,
    step_seconds,
)
from deploy.planning.tier_memory import FITS, GIB, NEAR, TOO_LARGE, fit_on, host_problems
from deploy.tiers.machine_table import load_machines
from deploy.tiers.tier import load_tier
from tests.deploy.conftest import Command
from tests.deploy.planted import planted_plan, remember_built
from tests.fixtures import Json, Patch
from trainer.base.run_files.plan_file import (
    FEW_CHANNELS,
    LinearInRows,
    StepPlan,
    StepWork,
    Work,
    kept_plan,
    plan_key,
    read_plan,
)
from trainer.base.settings.accelerators import arithmetic
from trainer.base.settings.request import Overrides
from trainer.base.settings.train_config import TrainConfig

CONFIG = TrainConfig(model="mlp", global_batch_size=64, steps=10_000, tf32=False)
TABLE = load_machines()
L4: Any = TABLE.accelerators["NVIDIA_L4"]
T4: Any = TABLE.accelerators["NVIDIA_TESLA_T4"]


PLAN = read_plan(planted_plan("float32", tempfile.mkdtemp()))


def fit_of(plan: StepPlan, tier: str, **changes: Any) -> Any:
    return fit_on(plan, replace(CONFIG, **changes), load_tier(tier))


def plan_with(**numbers: float) -> StepPlan:
    return read_plan(planted_plan(**numbers))


@pytest.mark.parametrize(
    ("row_gib", "verdict"), [(0.01, FITS), (0.27, NEAR), (0.33, NEAR), (0.5, TOO_LARGE)]
)
def test_what_a_step_holds_is_compared_with_the_card(row_gib: float, verdict: str) -> None:
    """1 GiB, 64 rows and what is assumed of a GPU, in the 22.3 GiB of an L4."""
    plan = plan_with(row_gib=row_gib)
    fit = fit_of(plan, "l4x1")
    assert fit.verdict == verdict
    assert fit.needed.middle == pytest.approx(
        (1 + 64 * row_gib + CONSTANTS.context_gib + 0.5) * GIB
    )
    for batch, fits in ((fit.largest_batch, True), (fit.largest_batch + 1, False)):
        again = fit_of(plan, "l4x1", global_batch_size=batch)
        assert (again.verdict == FITS) == fits


@pytest.mark.parametrize(
    ("tier", "most"), [("t4x1", 1.0), ("h100x1", CONSTANTS.convolutions_gib[1])]
)
def test_a_job_bounds_what_convolutions_try_on_a_small_card(tier: str, most: float) -> None:
    plan = plan_with()
    work = [plan.work.operations[0]._replace(type="Conv2D"), *plan.work.operations[1:]]
    convolutions = replace(plan, work=replace(plan.work, operations=work))
    without, with_them = (fit_of(each, tier).needed for each in (plan, convolutions))
    assert with_them.high - without.high == pytest.approx(most * GIB)


@pytest.mark.parametrize(
    ("gflop", "data_gib", "held_gib"), [(0.0, 5.0, 5.0), (0.0, 7.0, 0.0), (1.0, 5.0, 0.0)]
)
def test_data_lie_on_the_card_if_a_quarter_of_it_holds_them_and_programs_run_many_steps(
    gflop: float, data_gib: float, held_gib: float
) -> None:
    plan = plan_with(gflop=gflop)
    with_data = replace(plan, data_bytes=int(data_gib * GIB))
    without, fit = (fit_of(each, "l4x1").needed.middle for each in (plan, with_data))
    assert fit - without == pytest.approx(held_gib * GIB)


def test_four_gpus_hold_a_quarter_of_the_rows_and_16_bits_half_of_them() -> None:
    plan = plan_with(row_gib=1.0)
    one, four = (fit_of(plan, name) for name in ("l4x1", "l4x4"))
    half = fit_of(plan, "l4x4", precision="mixed_bfloat16")
    assert one.verdict == TOO_LARGE
    assert four.verdict == NEAR
    assert half.verdict == FITS
    # all-reduces need buffers
    assert 3.5 * one.largest_batch < four.largest_batch <= 4 * one.largest_batch


@pytest.mark.parametrize(("tier", "least"), [("l4x1", 8), ("l4x4", 2)])
def test_the_least_number_of_micro_batches_that_fits_is_proposed(tier: str, least: int) -> None:
    plan = plan_with(row_gib=1.0)
    fits = {count: fit_of(plan, tier, micro_batches=count) for count in (1, 2, 4, 8)}
    assert [count for count, fit in fits.items() if fit.verdict == FITS] == [
        count for count in fits if count >= least
    ]
    option, *others = fits[1].options
    assert option.name == "micro_batches"
    assert option.value == least
    assert option.slower
    assert [other.name for other in others] == (["precision"] if least == 2 else [])
    assert fits[1].words.endswith(f", this one with {' or '.join(map(str, fits[1].options))}")
    assert option.saved == pytest.approx(fits[1].needed.middle - fits[least].needed.middle)


def test_virtual_replicas_cost_micro_batches_gathered_gradients_and_their_sums() -> None:
    """8 on 4 devices: 2 micro-batches each; then each device gets the 10**8 bytes of the 3
    others."""
    micro = replace(CONFIG, micro_batches=2)
    virtual = replace(CONFIG, virtual_replicas=8)
    by_micro, by_virtual = (step_seconds(PLAN, config, L4, 4) for config in (micro, virtual))
    assert by_virtual.middle - by_micro.middle == pytest.approx(
        (3 - 1.5) * 1e8 / (L4.rates.link_gb_per_s * 1e9)
    )
    fits = [fit_on(PLAN, config, load_tier("l4x4")) for config in (micro, virtual)]
    assert fits[1].needed.middle - fits[0].needed.middle == pytest.approx(3e8)


def test_16_bits_are_proposed_on_cards_alone_that_have_them() -> None:
    """A T4 has no bfloat16. test_cached_plans.py has cards that do."""
    fit = fit_of(plan_with(row_gib=0.25, gflop=100.0), "t4x1")
    assert [option.name for option in fit.options] == ["micro_batches"]


def test_data_that_fit_neither_memory_nor_disk_are_named() -> None:
    memory, disk = host_problems(replace(PLAN, data_bytes=80 * 10**9), load_tier("l4x1"))
    assert memory.startswith(
        "the data need 153 GiB of the 48 GB of g2-standard-12: prepare them (python -m trainer.data"
    )
    assert disk == "the staged data need 80 GB of a disk of 100 GB: raise bootDiskSizeGb"
    assert [*host_problems(PLAN, load_tier("l4x1"))] == []


def test_the_time_is_that_of_the_device_and_of_the_host() -> None:
    """Each product takes its FLOPs or its bytes; 1,000 operations are started."""
    tf32 = replace(CONFIG, tf32=True)
    plain = CONSTANTS.plain
    compiled = CONSTANTS.compiled
    byte_bound = plan_with()
    flop_bound = plan_with(gflop=1e3)
    moved = 100 * (1e6 + 64 * 50e6) / 300e9
    assert device_seconds(byte_bound.work, 64, L4.rates, "tf32", compiled) == pytest.approx(
        compiled.products * moved
    )
    for kind, formula, slower in (
        ("tf32", plain, plain),
        ("tf32", compiled, compiled),
        ("float32", plain, plain),
        ("float32", compiled, plain),
    ):
        counted = 100 * 64e12 / (L4.rates.tflops[kind] * 1e12)
        assert device_seconds(flop_bound.work, 64, L4.rates, kind, formula) == pytest.approx(
            slower.products * counted
        )
    attention = Work([StepWork("Einsum", 1, LinearInRows(0, 1e6), LinearInRows(0, 300e6 / 64))])
    assert device_seconds(attention, 64, L4.rates, "tf32", compiled) == pytest.approx(
        plain.products * 1e-3
    )
    kind = f"FusedBatchNormGradV3{FEW_CHANNELS}"
    batch_norm = Work([StepWork(kind, 1, LinearInRows(0, 0), LinearInRows(300e6, 0))])
    seconds = device_seconds(batch_norm, 64, L4.rates, "tf32", plain)
    assert seconds == pytest.approx(plain.few_channels * 1e-3)
    assert step_seconds(plan_with(gflop=0.0), tf32, L4, 1).middle == pytest.approx(
        compiled.others * moved + 1000 * compiled.operation_seconds
    )
    # as plain, if the products alone would take longer
    alone = step_seconds(byte_bound, tf32, L4, 1)
    assert alone.middle == pytest.approx(
        plain.products * moved + 1000 * plain.operation_seconds + plain.step_seconds
    )
    of_two: Any = byte_bound.work_of_two
    summed = all_reduce_seconds(of_two, 4, 1, L4.rates.link_gb_per_s)
    assert summed == pytest.approx(30e-6 + 1.5 * 1e8 / 32e9)
    quarter = (
        plain.products * 100 * (1e6 + 16 * 50e6) / 300e9
        + 1100 * plain.operation_seconds
        + plain.step_seconds
    )
    assert step_seconds(byte_bound, tf32, L4, 4).middle == pytest.approx(quarter + summed)


def test_the_interval_is_that_of_the_fit_and_wider_where_nothing_was_measured() -> None:
    """Steps of few FLOPs may run in one program, and then cost the host nothing."""
    h100 = TABLE.accelerators["NVIDIA_H100_80GB"]
    tf32 = replace(CONFIG, tf32=True)
    (low, high) = CONSTANTS.compiled.band
    wider = CONSTANTS.elsewhere
    plan = plan_with(gflop=1e3)
    for gpu, config, factor in ((h100, tf32, 1.0), (h100, CONFIG, wider), (L4, tf32, wider)):
        step = step_seconds(plan, config, gpu, 1)
        assert (step.low, step.high) == pytest.approx(
            (low / factor * step.middle, high * factor * step.middle)
        )
    small = step_seconds(plan_with(gflop=0.0), tf32, h100, 1)
    host = 1000 * CONSTANTS.compiled.operation_seconds
    assert (small.low, small.high) == pytest.approx(
        (low * (small.middle - host), high * small.middle)
    )


def test_steps_that_sum_within_are_compiled_on_one_gpu_alone() -> None:
    plan = replace(PLAN, sums_within=True)
    forced = replace(CONFIG, jit_compile="true")
    assert [
        is_compiled(plan, config, devices) for config in (CONFIG, forced) for devices in (1, 4)
    ] == [True, False] * 2
    assert is_compiled(PLAN, CONFIG, 4)


def test_cpus_take_what_this_one_took_by_their_number() -> None:
    """33 s for 64 rows on 2: on 8 of another processor from 0.4 of a quarter to 2.5 times that."""
    machine = TABLE.machines["n1-standard-8"]
    assert cpu_step_seconds(PLAN, CONFIG, machine, 1) == Interval(0.4 * 33 / 4, 33 / 2, 2.5 * 33)
    two: Any = cpu_step_seconds(PLAN, CONFIG, machine, 2)
    # half of the rows, and the network
    assert two.middle == pytest.approx(17 / 2 + 200e-6 + 1e8 / 2e9)
    mixed = forecast(load_tier("cpu"), PLAN, replace(CONFIG, precision="mixed_float16"))
    assert (
        "no time of n1-standard-8 at precision=mixed_float16: give a run with --from="
        in mixed.problems
    )


@pytest.mark.parametrize(
    ("precision", "tf32", "on_l4", "on_t4"),
    [
        ("float32", True, "tf32", "float32"),
        ("float32", False, "float32", "float32"),
        ("float64", True, "", ""),
        ("mixed_bfloat16", True, "16_bit", "float32"),
        ("mixed_float16", True, "16_bit", "16_bit"),
    ],
)
def test_a_card_multiplies_as_it_can(precision: str, tf32: bool, on_l4: str, on_t4: str) -> None:
    config = replace(CONFIG, precision=precision, tf32=tf32)
    assert arithmetic(config, L4.rates.tflops) == on_l4
    assert arithmetic(config, T4.rates.tflops) == on_t4


def test_spot_costs_its_restarts_and_has_no_end_if_they_lose_all() -> None:
    tier = load_tier("l4x1")
    job = Interval(3600.0, 7200.0, 10_800.0)
    standard, spot = priced_estimates(tier, job, 300.0)
    assert standard.strategy == "STANDARD"
    assert standard.hours == Interval(1, 2, 3)
    assert standard.usd.middle == pytest.approx(2 * standard.usd_per_hour)
    assert spot.strategy == "SPOT"
    assert spot.hours.low == 1
    assert spot.hours.middle == pytest.approx(2 / (1 - PREEMPTIONS_PER_HOUR * 900 / 3600))
    assert spot.hours.high == pytest.approx(3 / (1 - 2 * PREEMPTIONS_PER_HOUR * 900 / 3600))
    assert [each.strategy for each in priced_estimates(tier, job, 90_000.0)] == ["STANDARD"]
    h100 = priced_estimates(load_tier("h100x1"), job, 300.0)
    assert [each.strategy for each in h100] == ["SPOT", "FLEX_START"]
    for every, lost in (
        ((500, 0), 125),
        ((0, 0), 5e5),
        ((0, 2), 60),
        ((500, 2), 60),
        ((100, 2), 25),
    ):
        assert lost_by_preemption(0.5, *every, 1e6) == lost


def planned(*flags: str, precision: str = "float32", **numbers: float) -> list[str]:
    plan = f"--plan={planted_plan(precision, **numbers)}"
    return ["plan", "--recipe=mlp_mnist", f"--precision={precision}", plan, "--out=out", *flags]


def written() -> Any:
    return json.loads(Path("out/forecast.json").read_text())


def test_every_tier_of_the_package_is_planned(typed: Command) -> None:
    shown = typed(*planned("--global_batch_size=64", "--all", gflop=100.0))
    tiers = {each["tier"]: each for each in written()["tiers"]}
    assert len(tiers) >= 26
    times = [tiers[name]["step"]["middle"] for name in ("t4x1", "l4x1", "a100x1", "h100x1")]
    assert times == sorted(times, reverse=True)
    assert tiers["cpu"]["basis"] == "cpu"
    assert "| l4x1-2workers | spot | fits |" in Path("out/plan.md").read_text()
    usd = [float(each) for each in re.findall(r" (?:spot|standard) [^$\n]*\$([\d.]+)", shown)]
    assert len(usd) > 20
    assert usd == sorted(usd)


@pytest.mark.parametrize(
    ("price", "left"),
    [
        ("--prices=prices.yaml", {"STANDARD": 4.0}),
        ("--price_per_hour=l4x4=3", {"STANDARD": 3.0}),
        ("--prices=both.yaml", {"STANDARD": 4.0, "SPOT": 2.0}),
    ],
)
def test_a_price_of_the_users_own_is_not_mixed_with_one_of_the_table(
    price: str, left: dict[str, float], typed: Command
) -> None:
    Path("prices.yaml").write_text("g2-standard-48: 4.0\n")
    Path("both.yaml").write_text("g2-standard-48: {list: 4.0, spot: 2.0}\n")
    typed(*planned("l4x2", "l4x4", "--global_batch_size=64", price))
    two, four = written()["tiers"]
    assert [each["strategy"] for each in two["offers"]] == ["STANDARD", "SPOT"]
    # a file's price is that of the machine alone
    disk = 0 if "per_hour" in price else 100 * 0.17 / 730
    usd = {each["strategy"]: each["usd_per_hour"] - disk for each in four["offers"]}
    assert usd == pytest.approx(left)
    assert (four["problems"] == ["no price known as spot or flex-start"]) == (len(left) == 1)


@pytest.mark.parametrize(
    ("flags", "precision", "answer"),
    [
        (
            ["t4x1"],
            "float64",
            "t4x1: no time of NVIDIA_TESLA_T4 at precision=float64: give a run with --from=",
        ),
        (
            ["l4x8", "--global_batch_size=12"],
            "float32",
            "l4x8: global_batch_size=12 does not divide over 8 replicas: take 8 or 16",
        ),
        (["l4x1", "--global_batch_size=6400"], "float32", "fits?: no: needs "),
    ],
)
def test_each_reason_is_one_line(
    flags: list[str], precision: str, answer: str, typed: Command
) -> None:
    typed(*planned(*flags, precision=precision))
    assert any(each.startswith(answer) for each in written()["sentences"])


def test_what_is_installed_first_takes_time_and_money_and_an_own_image_saves_it(
    typed: Command,
) -> None:
    hours = []
    for _ in range(2):
        shown = typed(*planned("l4x1", "--global_batch_size=64", gflop=100.0))
        (tier,) = written()["tiers"]
        standard, _ = tier["offers"]
        hours.append(standard["hours"]["middle"])
        for end, each in standard["hours"].items():
            seconds = tier["seconds"][end] + tier["install_seconds"][end]
            assert 3600 * each == pytest.approx(seconds)
        assert standard["usd"]["middle"] == pytest.approx(standard["usd_per_hour"] * hours[-1])
        assert ("4 min installing" in shown) == bool(tier["install_seconds"]["middle"])
        remember_built()
    assert 3600 * (hours[0] - hours[1]) == pytest.approx(240)


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("--budget=-1", "budget=-1.0 must be above 0 USD"),
        ("--plan=nowhere.json", "nowhere.json is missing: make it again (python -m trainer.plan)"),
        ("--plan=plan.json", "plan.json: it was made for other settings or sources (mlp on "),
    ],
)
def test_wrong_flags_are_refused(flag: str, line: str, refused: Command) -> None:
    planted_plan()
    assert line in refused("plan", "l4x1", "--recipe=mlp_mnist", "--width=64", "--out=.", flag)


def test_a_plan_is_kept_by_what_it_depends_on(monkeypatch: Patch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", ".")
    assert kept_plan(CONFIG).parent == Path("vertex-trainer/plans")

    def keys(*changes: Json) -> set[str]:
        return {plan_key(replace(CONFIG, **change)) for change in ({}, *changes)}

    free = {"steps": 3, "job_dir": "x", "global_batch_size": 8, "seed": 3, "replicas": 2}
    # the steps of both precisions are measured in float32
    assert len(keys(free, {"precision": "mixed_float16"}, {"precision": "mixed_bfloat16"})) == 1
    others = ({"image_size": 16}, {"precision": "float64"}, {"data": "mnist"}, {"channels": 3})
    assert len(keys(*others)) == 5
    places = ("photos", "folder:photos/", "/home/me/photos", "gs://bucket/photos")
    assert len({plan_key(replace(CONFIG, data=each)) for each in places}) == 1
    own: Json = {"model": "mine_to_plan:build"}
    monkeypatch.syspath_prepend(".")
    made = []
    for code in ("one = 1\n", "one = 2\n"):
        Path("mine_to_plan.py").write_text(code)
        made.append(keys(own))
    assert made[0] != made[1]
    flags = ([], ["--dropout=0.5"], ["--width=64"], ["--seed=3"])
    parsed = [Overrides.parse(["--model=mlp", "--data=digits", *each]) for each in flags]
    assert len({plan_key(each.config) for each in parsed}) == 3


def test_several_devices_have_no_time_if_a_step_of_two_replicas_could_not_be_traced() -> None:
    two = forecast(load_tier("l4x2"), replace(PLAN, work_of_two=None), CONFIG)
    assert two.step is None
    assert (
        "no time: its step could not be traced on two replicas (python -m trainer.plan says why)"
        in two.problems
    )
