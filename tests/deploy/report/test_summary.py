"""Tests the table against an independent reading of the files, and in its three forms."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deploy.report.collection import collect
from deploy.report.formatting import figures
from deploy.report.measures import MEASURES, TierSummary, summarize
from deploy.report.table import notes, table_lines, to_json, to_markdown, to_terminal
from deploy.report.verdict import verdict
from tests.deploy.planted import content as read
from tests.deploy.planted import edit, noisy, plant
from tests.fixtures import Json
from trainer.base.settings.rules import IMAGE_MEASURES

QUALITY = tuple(measure.key for measure in MEASURES if measure.key in IMAGE_MEASURES)


def rows_of(baseline: str = "", **prices: float) -> dict[str, TierSummary]:
    return {row.tier: row for row in summarize(collect(["."]), baseline, prices)}


def words_of(**prices: float) -> str:
    collection = collect(["."])
    return "\n".join(verdict(collection, summarize(collection, "", prices)))


def comparison(*tiers: Json, scaling: str = "strong", on: str = "local", **runs: Json) -> None:
    """Plants a comparison of these tiers, and a run of each tier in `runs`, with these arguments of
    `plant`."""
    asked = {"on": on, "tiers": tiers, "flags": [], "scaling": scaling, "repeats": 1}
    Path("comparison.json").write_text(json.dumps(asked))
    for tier, run in runs.items():
        plant(f"{tier}/repeat-1", **run)


L4X1 = {
    "name": "l4x1",
    "machine_type": "g2",
    "accelerator_type": "NVIDIA_L4",
    "accelerators": 1,
    "price_per_hour": 0.8,
}
L4X2 = {**L4X1, "name": "l4x2", "accelerators": 2, "price_per_hour": 1.6}


def test_the_table_agrees_with_an_independent_reading() -> None:
    """Compares with NumPy on the raw lines, without any function of deploy/."""
    falling = np.linspace(2, 0.7, 20).tolist()
    plant("one/repeat-1", noisy(0.1), losses=FALLING, fid=30, steps_per_report=60)
    plant("one/repeat-2", noisy(0.11), losses=falling, fid=20, startup=8, steps_per_report=60)
    plant("two/repeat-1", noisy(0.06), devices=("GPU:0", "GPU:1"), epochs=True)
    one, two = rows_of(one=3.6, two=7.2).values()
    steps = {"one": [], "two": []}
    for file in Path().glob("*/*/stats.jsonl"):
        _, *lines = map(json.loads, file.read_text().splitlines())
        steps[file.parts[0]] += [line["step_seconds"] for line in lines]
    speeds = {name: np.median([100 / value for value in each]) for name, each in steps.items()}
    for row in (one, two):
        found = (row.step_seconds.low, row.step_seconds.median, row.step_seconds.high)
        assert found == pytest.approx(np.percentile(steps[row.tier], [25, 50, 75]), rel=1e-12)
        assert row.step_seconds.count == len(steps[row.tier])
        assert row.images_per_second.median == pytest.approx(speeds[row.tier])
    walls = [read(f"one/repeat-{n}/result.json")["wall_seconds"] for n in (1, 2)]
    assert one.total_seconds == pytest.approx(np.median(walls))
    assert one.startup_seconds == 6.5
    assert one.fid == 25
    assert one.final_loss == pytest.approx(0.6)
    assert one.cost == pytest.approx(3.6 * one.total_seconds / 3600)
    assert one.cost_per_million_images == pytest.approx(3.6 / 3600 * 1e6 / speeds["one"])
    assert two.speed_up == pytest.approx(speeds["two"] / speeds["one"])
    assert two.efficiency == pytest.approx(two.speed_up / 2)
    assert one.repeats == 2
    assert one.steps == 1200


def test_a_missing_price_leaves_costs_empty_with_the_reason() -> None:
    for name, seconds in (("a", 0.1), ("b", 0.05), ("c", 0.02)):
        plant(name, noisy(seconds))
    rows = rows_of(a=1.0, b=1.5)
    c = rows["c"]
    assert {c.price_per_hour, c.cost, c.cost_per_million_images} == {None}
    line = "c: its price is not known: use --price_per_hour=TIER=USD."
    assert line in notes(list(rows.values()), collect(["."]))
    words = words_of(a=1.0, b=1.5)
    assert words.startswith(
        "Buy b, the cheapest: $0.006 and 16 s a run; if time counts more, c, whose price is not"
    )
    assert "The advice is among a, b, whose prices are known." in words
    assert "Which one to buy is not known without prices: add --price_per_hour" in words_of(a=1.0)


def test_a_tier_that_failed_or_was_not_run_is_reported_and_not_ranked() -> None:
    failure = {
        "seconds": noisy(0.01),
        "state": "failed",
        "error": "step 7: loss is NaN or infinite",
    }
    comparison(L4X1, L4X2, {**L4X1, "name": "b"}, l4x1={"seconds": noisy(0.1)}, b=failure)
    edit("l4x1/repeat-1/result.json", depends_on_replicas=["dense differs"])
    rows = rows_of(b=1.0)
    failed = rows["b"]
    absent = rows["l4x2"]
    assert failed.state == "failed"
    assert {failed.speed_up, failed.total_seconds, failed.final_loss, failed.cost} == {None}
    ended = "the run ended as 'failed': step 7: loss is NaN or infinite"
    assert failed.missing[0] == ended
    assert absent.state == "missing"
    assert absent.devices == 2
    assert absent.step_seconds is None
    assert absent.missing[0] == "it was not run"
    words = words_of()
    assert words.startswith("Not ranked: fewer than two tiers of real devices have a speed.")
    assert f"b: {ended}." in words
    assert "l4x2: it was not run." in words
    assert "l4x1: its numbers are those of 1 replicas alone (--allow_replica_dependence)." in words


def test_what_was_paid_is_what_vertex_ai_billed() -> None:
    """A run of some seconds is billed for minutes: all its jobs count."""
    comparison(L4X1, L4X2, on="vertex")
    bills = {"l4x1": {"1": {"seconds": 300.0, "usd": 0.07}, "2": {"seconds": 60.0, "usd": 0.01}}}
    bills["l4x2"] = {"3": {"seconds": 200.0, "usd": 0.08}}
    why = "the others wait for its batches, 20 % of the time of all steps"
    for name, devices in (("l4x1", ["GPU:0"]), ("l4x2", ["GPU:0", "GPU:1"])):
        folder = plant(f"{name}/repeat-1", noisy(0.1 / len(devices)), devices=devices)
        assert rows_of()[name].cost is None
        assert rows_of()[name].missing[0] == "what Vertex AI billed is not recorded"
        (folder / "billed.json").write_text(json.dumps({"jobs": bills[name]}))
        goodput = {"step": 0.5 * read(folder / "result.json")["wall_seconds"]}
        slow = {"name": "workerpool1-0", "why": why}
        edit(folder / "result.json", goodput=goodput, between_jobs_seconds=40.0, slow_worker=slow)
    one, two = rows_of().values()
    assert one.total_seconds == 360.0
    assert one.cost == pytest.approx(0.8 * 360 / 3600)
    assert two.cost == pytest.approx(1.6 * 200 / 3600)
    wall = read("l4x1/repeat-1/result.json")["wall_seconds"]
    assert one.goodput == pytest.approx(0.5 * wall / 360)
    assert one.paid == two.paid == 0.08
    words = words_of()
    assert words.startswith(
        "Buy l4x2, the fastest: $0.09 and 3.3 min a run, 1.8 x as fast as the cheapest for 1.1 x"
        " the money; if money counts more, l4x1: $0.08 and 6 min a run."
    )
    assert f"l4x1: workerpool1-0 is slow: {why}." in words
    Path("l4x1/repeat-1/billed.json").unlink()
    edit("l4x1/repeat-1/run.json", on_vertex=True)
    # a job directory by itself
    (row,) = summarize(collect(["l4x1/repeat-1"]), "", {"l4x1": 0.8})
    assert row.missing[0] == "what Vertex AI billed is not recorded"


def test_a_tier_that_failed_shows_what_was_paid_for_it() -> None:
    comparison(L4X1, on="vertex", l4x1={"seconds": [0.1], "state": "failed"})
    folder = Path("l4x1/repeat-1")
    for name in ("run.json", "stats.jsonl"):
        (folder / name).unlink()
    (folder / "billed.json").write_text('{"jobs": {"1": {"seconds": 300, "usd": 0.5}}}')
    assert rows_of()["l4x1"].values["paid"] == 0.5
    assert "l4x1: the run ended as 'failed'; $0.50 was paid for all attempts." in words_of()
    (folder / "result.json").unlink()
    assert rows_of()["l4x1"].paid == 0.5


def test_tiers_of_the_same_speed_and_money_are_equally_good() -> None:
    both: Any = {"l4x1": {"seconds": noisy(0.1)}, "t4x1": {"seconds": noisy(0.1001)}}
    comparison(L4X1, {**L4X1, "name": "t4x1", "price_per_hour": 0.801}, on="vertex", **both)
    start = "Buy l4x1 or t4x1, equal in time and money within the spread: $0.22 and 17 min"
    assert words_of().startswith(f"{start} per million images.")


def test_the_advice_says_what_is_not_significant_and_what_spot_means() -> None:
    both: Any = {"l4x1": {"seconds": noisy(0.1)}, "spot": {"seconds": noisy(0.101)}}
    comparison(L4X1, {**L4X1, "name": "spot", "price_per_hour": 0.3}, on="vertex", **both)
    request = Path("comparison.json")
    edit(request, strategies={"l4x1": "STANDARD", "spot": "SPOT"})
    words = words_of()
    assert words.startswith(
        "Buy spot, the cheapest: $0.08 and 17 min per million images; l4x1 is not"
        " measurably faster; if it must not be interrupted, l4x1: $0.22 and 17 min per million"
    )
    assert "Google may take spot machines away at any time" in words
    assert rows_of()["spot"].machine == "g2 + 1 x NVIDIA_L4, spot"


def test_a_faster_tier_says_how_much_faster_and_dearer_it_is() -> None:
    both: Any = {"l4x1": {"seconds": noisy(0.1)}, "l4x2": {"seconds": noisy(0.085)}}
    comparison(L4X1, L4X2, on="vertex", **both)
    end = "14 min per million images, 1.2 x as fast for 1.7 x the money."
    assert words_of().splitlines()[0].endswith(end)


def test_a_long_start_up_is_never_advised_for_time() -> None:
    plant("one", noisy(0.1))
    plant("two", noisy(0.05), devices=("GPU:0", "GPU:1"), startup=100)
    assert words_of(one=1.0, two=2.0).startswith("Buy one, the cheapest: $0.007 and 26 s a run.\n")


def test_a_run_of_the_desk_is_one_of_this_computer_without_a_price() -> None:
    cpu = {"name": "cpu", "machine_type": "n1-standard-8", "price_per_hour": 0.4}
    comparison(cpu, cpu={"seconds": noisy(0.1), "devices": ("CPU:0",)})
    edit("cpu/repeat-1/run.json", processor="EPYC")
    row = rows_of()["cpu"]
    assert row.machine == "this computer (EPYC)"
    assert row.kind == "CPU"
    assert {row.price_per_hour, row.cost, row.paid, row.efficiency} == {None}


def test_only_images_that_are_decoded_are_said_to_need_preparing() -> None:
    for name in ("files", "table"):
        plant(name, noisy(0.1), waited=0.3)
    edit("files/run.json", data={"converted": {}, "examples_per_step": 100})
    words = words_of()
    assert (
        "files: waiting for input 30 %: prepare the data (python -m trainer.data.prepare)." in words
    )
    assert "table: waiting for input 30 %." in words


def test_noise_is_called_equal_and_a_difference_is_not() -> None:
    plant("a", noisy(0.100))
    plant("b", noisy(0.102), devices=("GPU:0", "GPU:1"))
    words = words_of()
    assert re.search(r"Fastest: a, .* images/s; equal within the spread: b\.", words)
    plant("c", noisy(0.080))  # faster by more than the spread
    assert re.search(r"Fastest: c, .* images/s, 1.25 x a\.", words_of())


FALLING = np.linspace(2, 0.5, 20).tolist()


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (FALLING, "The final losses are equal up to rounding: loss 0.500."),
        (
            [loss * 1.01 for loss in FALLING],
            "The final losses agree within 0.99 %: loss 0.500 to 0.505.",
        ),
        (
            [loss * factor for loss, factor in zip(FALLING, [1.0, 1.2] * 10, strict=True)],
            "agree within 17 %, which is less than the loss changes between reports: loss 0.500",
        ),
        (
            [loss * 1.5 for loss in FALLING],
            "Different final losses: loss 0.750 on b, 0.500 on a: rounding alone can",
        ),
    ],
)
def test_final_losses_are_compared(other: list[float], words: str) -> None:
    for name, losses in (("a", FALLING), ("b", other)):
        plant(name, noisy(0.1), losses=losses)
    assert words in words_of()
    assert words_of().count("inal losses") == 1


def test_different_work_and_settings_are_reported() -> None:
    for name, count in (("a", 20), ("b", 20), ("short", 19)):
        plant(name, noisy(0.1, count))
    changed = {"model": "mlp", "global_batch_size": 100, "learning_rate": 0.2, "seed": 0}
    edit("short/run.json", config=changed)
    words = words_of()
    differing = "steps is 200 (a, b), 190 (short); learning_rate is 0.1 (a, b), 0.2 (short)."
    assert words.startswith(f"Not ranked, because the runs did different work: {differing}")
    assert not re.search("Buy|Fastest|inal losses|as fast", words)
    assert [row.speed_up for row in rows_of().values()] == [1.0, 1.0, None]


def test_weak_scaling_has_an_efficiency_and_compares_no_losses() -> None:
    comparison(
        L4X1,
        L4X2,
        scaling="weak",
        l4x1={"seconds": noisy(0.1), "losses": [1.0] * 20},
        l4x2={"seconds": noisy(0.125), "devices": ("GPU:0", "GPU:1"), "batch": 200},
    )
    row = rows_of()["l4x2"]
    assert row.speed_up == pytest.approx(1.6, rel=0.01)
    assert row.efficiency == pytest.approx(0.8, rel=0.01)
    assert "inal losses" not in words_of()
    edit("comparison.json", parallel=2)
    assert "Up to 2 runs shared this machine and slowed each other down: use -" in words_of()


def test_devices_are_compared_with_their_own_kind() -> None:
    """Shows that two slow devices against one fast one are no measure of scaling."""
    comparison(
        {**L4X1, "name": "a100", "accelerator_type": "NVIDIA_TESLA_A100"},
        L4X1,
        L4X2,
        a100={"seconds": noisy(0.01), "gpu": "NVIDIA A100-SXM4-40GB"},
        l4x1={"seconds": noisy(0.1), "gpu": "NVIDIA L4"},
        l4x2={"seconds": noisy(0.05), "gpu": "NVIDIA L4", "devices": ("GPU:0", "GPU:1")},
    )
    rows = rows_of()
    assert rows["l4x2"].speed_up == pytest.approx(0.2)
    assert rows["l4x2"].efficiency is None
    assert rows_of("l4x1")["l4x2"].efficiency == pytest.approx(1)


def test_simulated_devices_are_marked_and_have_times_but_neither_efficiency_nor_cost() -> None:
    comparison(
        L4X1,
        L4X2,
        l4x1={"seconds": noisy(0.1), "devices": ("CPU:0",)},
        l4x2={"seconds": noisy(0.15), "devices": ("CPU:0", "CPU:1")},
    )
    priced: Any = {"l4x1": 1.0, "l4x2": 2.0}
    for prices in ({}, priced):
        one, two = rows_of(**prices).values()
        assert two.speed_up is None
        for row in (one, two):
            keys = ("step_seconds", "images_per_second", "total_seconds", "efficiency", "cost")
            assert {row.values[key] for key in keys} == {None}
            assert row.machine == "this computer"
            assert row.final_loss == pytest.approx(0.05)
            assert row.simulated == "NVIDIA_L4 simulated on a CPU"
        words = words_of(**prices)
        assert words.startswith(
            "The final losses are equal up to rounding: loss 0.0500.\nSimulated"
        )
        assert not re.search("Fastest|Best buy|Not ranked", words)
    remarks = [*notes([one, two], collect(["."]))]
    assert "simulated" in to_markdown([one, two], remarks).lower()
    assert "simulated" in to_json([one, two], [], [])
    assert not re.search("images/s|speed-up|paid", to_terminal([one, two]))


def test_an_unknown_machine_is_not_guessed() -> None:
    comparison(L4X1, L4X2)
    for name, seconds in (("l4x1", 0.1), ("l4x2", 0.2)):
        (plant(f"{name}/repeat-1", noisy(seconds)) / "run.json").write_text("{}")
    for row in rows_of().values():
        assert row.kind == "unknown"
        assert {row.efficiency, row.cost, row.price_per_hour} == {None}


def test_the_three_forms_hold_the_same_values() -> None:
    plant("a|b", noisy(0.1))
    plant("c", noisy(0.05), devices=("GPU:0", "GPU:1"), tflop=1.0)
    collection = collect(["."])
    rows = summarize(collection, usd_by_tier={"c": 2.0})
    remarks = [*notes(rows, collection)]
    first, second = json.loads(to_json(rows, remarks, ["words"]))["tiers"]
    assert first["tier"] == "a|b"
    assert second["step_seconds"]["median"] == rows[1].step_seconds.median
    assert first["cost"] is None
    markdown = to_markdown(rows, remarks).splitlines()
    assert markdown[2].startswith(r"| a\|b | done |")
    table = str(table_lines(rows))
    for measure in MEASURES:
        if all(getattr(row, measure.key) is not None for row in rows):
            assert measure.title in table
    assert len(to_terminal(rows).splitlines()) <= 9
    assert rows[0].mfu is None
    assert rows[1].mfu == pytest.approx(1 / rows[1].step_seconds.median / 494)
    assert re.search(r"'MFU', '', '4\.\d %'", table)
    assert "FID" not in "".join([markdown[0], *remarks])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (12345, "12,300"),
        (0.0078601, "0.00786"),
        (999.96, "1,000"),
        (-8.16, "-8.16"),
        (1e-12, "0.00000000000100"),
    ],
)
def test_figures(value: float, text: str) -> None:
    assert figures(value) == text


def test_images_measured_in_unlike_ways_are_not_put_side_by_side() -> None:
    about = {"features": "a.keras", "features_sha256": "1f", "samples": 100, "formulas": 1}
    for run, quality, measured in (
        ("one/repeat-1", about, {"fid": 30, "coverage": 0.5}),
        ("same/repeat-1", {**about, "features": "b.keras"}, {"fid": 20}),
        ("other/repeat-1", {**about, "samples": 99}, dict.fromkeys(QUALITY, 10.0)),
        ("mixed/repeat-1", about, {"fid": 10}),
        ("mixed/repeat-2", {**about, "features_sha256": "2f"}, {"fid": 10}),
    ):
        plant(run, noisy(0.1), quality=quality, **measured)
    rows = rows_of(baseline="one")
    assert {name: row.fid for name, row in rows.items()} == {
        "one": 30,
        "same": 20,
        "other": None,
        "mixed": None,
    }
    assert rows["one"].coverage == 0.5
    assert {name: getattr(rows["other"], name) for name in QUALITY} == dict.fromkeys(QUALITY)
    assert rows["other"].missing[-1].startswith("its features, images or formulas differ")
