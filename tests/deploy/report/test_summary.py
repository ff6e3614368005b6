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
from deploy.report.table import notes, shown, to_json, to_markdown, to_terminal
from deploy.report.verdict import verdict
from tests.deploy.planted import edit, noisy, plant
from trainer.base.settings.rules import IMAGE_MEASURES

QUALITY = tuple(measure.key for measure in MEASURES if measure.key in IMAGE_MEASURES)


def rows_of(folder: Path, baseline: str = "", **prices: float) -> dict[str, TierSummary]:
    return {row.tier: row for row in summarize(collect([str(folder)]), baseline, prices)}


def words_of(folder: Path, baseline: str = "", **prices: float) -> str:
    collection = collect([str(folder)])
    return "\n".join(verdict(collection, summarize(collection, baseline, prices)))


def comparison(
    folder: Path, scaling: str, *tiers: dict[str, object], on: str = "local", **runs: dict[str, Any]
) -> None:
    """Plants a comparison of these tiers, and a run of each tier in `runs`, with these arguments of
    `plant`."""
    asked = {"on": on, "tiers": tiers, "flags": [], "scaling": scaling, "repeats": 1}
    (folder / "comparison.json").write_text(json.dumps(asked))
    for tier, run in runs.items():
        plant(folder / tier / "repeat-1", **run)


L4X1 = {
    "name": "l4x1",
    "machine_type": "g2",
    "accelerator_type": "NVIDIA_L4",
    "accelerators": 1,
    "price_per_hour": 0.8,
}
L4X2 = {**L4X1, "name": "l4x2", "accelerators": 2, "price_per_hour": 1.6}


def test_the_table_agrees_with_an_independent_reading(tmp_path: Path) -> None:
    """Compares with NumPy on the raw lines, without any function of deploy/."""
    plant(tmp_path / "one" / "repeat-1", noisy(0.1), losses=FALLING, fid=30, steps_per_report=60)
    plant(
        tmp_path / "one" / "repeat-2",
        noisy(0.11),
        losses=np.linspace(2, 0.7, 20).tolist(),
        fid=20,
        startup=8,
        steps_per_report=60,
    )
    plant(tmp_path / "two" / "repeat-1", noisy(0.06), devices=("GPU:0", "GPU:1"), epochs=True)
    rows = rows_of(tmp_path, one=3.6, two=7.2)
    steps = {"one": [], "two": []}
    for file in tmp_path.glob("*/*/stats.jsonl"):
        steps[file.parts[-3]] += [
            json.loads(line)["step_seconds"] for line in file.read_text().splitlines()[1:]
        ]
    for name, row in rows.items():
        quartiles = np.percentile(steps[name], [25, 50, 75])
        found = (row.step_seconds.low, row.step_seconds.median, row.step_seconds.high)
        assert found == pytest.approx(quartiles, rel=1e-12)
        assert row.step_seconds.count == len(steps[name])
        assert row.images_per_second.median == pytest.approx(
            np.median([100 / value for value in steps[name]])
        )
    results = [
        json.loads((tmp_path / "one" / f"repeat-{n}" / "result.json").read_text()) for n in (1, 2)
    ]
    one = rows["one"]
    two = rows["two"]
    assert one.total_seconds == pytest.approx(
        np.median([result["wall_seconds"] for result in results])
    )
    assert (one.startup_seconds, one.fid, one.final_loss) == (6.5, 25, pytest.approx(0.6))
    assert one.cost == pytest.approx(3.6 * one.total_seconds / 3600)
    speed = np.median([100 / value for value in steps["one"]])
    assert one.cost_per_million_images == pytest.approx(3.6 / 3600 * 1e6 / speed)
    assert two.speed_up == pytest.approx(np.median([100 / value for value in steps["two"]]) / speed)
    assert two.efficiency == pytest.approx(two.speed_up / 2)
    assert two.epoch_seconds.median == pytest.approx(60 * np.median(steps["two"]))
    assert (one.repeats, one.steps) == (2, 1200)


def test_a_missing_price_leaves_costs_empty_with_the_reason(tmp_path: Path) -> None:
    for name, seconds in (("a", 0.1), ("b", 0.05), ("c", 0.02)):
        plant(tmp_path / name, noisy(seconds))
    rows = rows_of(tmp_path, a=1.0, b=1.5)
    assert (rows["c"].price_per_hour, rows["c"].cost, rows["c"].cost_per_million_images) == (
        None,
        None,
        None,
    )
    line = "c: its price is not known: use --price_per_hour=TIER=USD."
    assert line in notes(list(rows.values()), collect([str(tmp_path)]))
    words = words_of(tmp_path, a=1.0, b=1.5)
    assert words.startswith(
        "Buy b, $0.208 and 8 min per million images, the cheapest; if time counts more, c, whose"
    )
    assert "The advice is among a, b, whose prices are known." in words
    assert "Which one to buy is not known without prices: add --price_per_hour" in words_of(
        tmp_path, a=1.0
    )


def test_a_tier_that_failed_or_was_not_run_is_reported_and_not_ranked(tmp_path: Path) -> None:
    failure = {
        "seconds": noisy(0.01),
        "state": "failed",
        "error": "step 7: loss is NaN or infinite",
    }
    comparison(
        tmp_path,
        "strong",
        L4X1,
        L4X2,
        {**L4X1, "name": "b"},
        l4x1={"seconds": noisy(0.1)},
        b=failure,
    )
    edit(tmp_path / "l4x1" / "repeat-1" / "result.json", depends_on_replicas=["dense differs"])
    rows = rows_of(tmp_path, b=1.0)
    failed = rows["b"]
    absent = rows["l4x2"]
    assert (failed.state, failed.speed_up, failed.total_seconds, failed.final_loss) == (
        "failed",
        None,
        None,
        None,
    )
    ended = "the run ended as 'failed': step 7: loss is NaN or infinite"
    assert (failed.cost, failed.missing[0]) == (None, ended)
    assert (absent.state, absent.devices, absent.step_seconds) == ("missing", 2, None)
    assert absent.missing[0] == "it was not run"
    words = words_of(tmp_path)
    assert words.startswith("Not ranked: fewer than two tiers of real devices have a speed.")
    assert f"b: {ended}." in words
    assert "l4x2: it was not run." in words
    assert "l4x1: its numbers are those of 1 replicas alone (--allow_replica_dependence)." in words


def test_what_was_paid_is_what_vertex_ai_billed(tmp_path: Path) -> None:
    """A run of some seconds is billed for minutes: all its jobs count, and what no class knows is
    shown as other."""
    comparison(tmp_path, "strong", L4X1, L4X2, on="vertex")
    bills = {"l4x1": {"1": {"seconds": 300.0, "usd": 0.07}, "2": {"seconds": 60.0, "usd": 0.01}}}
    bills["l4x2"] = {"3": {"seconds": 200.0, "usd": 0.08}}
    for name, seconds, count in (("l4x1", 0.1, 1), ("l4x2", 0.05, 2)):
        folder = plant(
            tmp_path / name / "repeat-1", noisy(seconds), devices=[f"GPU:{i}" for i in range(count)]
        )
        (row,) = (row for row in rows_of(tmp_path).values() if row.tier == name)
        assert (row.cost, row.missing[0]) == (None, "what Vertex AI billed is not recorded")
        (folder / "billed.json").write_text(json.dumps({"jobs": bills[name]}))
        wall = json.loads((folder / "result.json").read_text())["wall_seconds"]
        goodput = {"step": 0.5 * wall, "training_prep": 0.2 * wall, "data_loading_sync": 0.3 * wall}
        slow = {
            "name": "workerpool1-0",
            "why": "the others wait for its batches, 20 % of the time of all steps",
        }
        edit(folder / "result.json", goodput=goodput, between_jobs_seconds=40.0, slow_worker=slow)
    one, two = rows_of(tmp_path).values()
    assert (one.paid_seconds, one.cost) == (360.0, pytest.approx(0.8 * 360 / 3600))
    assert two.cost == pytest.approx(1.6 * 200 / 3600)
    assert one.goodput == pytest.approx(0.5 * one.total_seconds / 360)
    words = words_of(tmp_path)
    advice = (
        "Buy l4x2, $0.0889 and 3.3 min a run, the fastest; if money counts more, l4x1, $0.08 and 6"
        " min a run."
    )
    assert words.startswith(advice)
    assert (one.paid, two.paid) == (0.08, 0.08)
    assert (
        "l4x1: workerpool1-0 is slow: the others wait for its batches, 20 % of the time of all"
        " steps." in words
    )
    alone = tmp_path / "l4x1" / "repeat-1"
    (alone / "billed.json").unlink()
    edit(alone / "run.json", on_vertex=True)
    (row,) = summarize(collect([str(alone)]), "", {"l4x1": 0.8})  # a job directory by itself
    assert (row.cost, row.missing[0]) == (None, "what Vertex AI billed is not recorded")


def test_a_tier_that_failed_shows_what_was_paid_for_it(tmp_path: Path) -> None:
    comparison(tmp_path, "strong", L4X1, on="vertex", l4x1={"seconds": [0.1], "state": "failed"})
    folder = tmp_path / "l4x1" / "repeat-1"
    for name in ("run.json", "stats.jsonl"):
        (folder / name).unlink()
    (folder / "billed.json").write_text('{"jobs": {"1": {"seconds": 300, "usd": 0.5}}}')
    assert rows_of(tmp_path)["l4x1"].values["paid"] == 0.5
    assert "l4x1: the run ended as 'failed'; $0.50 was paid for all attempts." in words_of(tmp_path)
    (folder / "result.json").unlink()
    assert rows_of(tmp_path)["l4x1"].paid == 0.5


def test_the_advice_says_what_is_not_significant_and_what_spot_means(tmp_path: Path) -> None:
    both: Any = {"l4x1": {"seconds": noisy(0.1)}, "spot": {"seconds": noisy(0.101)}}
    comparison(
        tmp_path,
        "strong",
        L4X1,
        {**L4X1, "name": "spot", "price_per_hour": 0.3},
        on="vertex",
        **both,
    )
    request = tmp_path / "comparison.json"
    edit(request, strategies={"l4x1": "STANDARD", "spot": "SPOT"})
    words = words_of(tmp_path)
    assert words.startswith(
        "The speeds differ by no more than they vary, so buy the cheapest: spot (spot, may be"
        " interrupted), $0.0842"
    )
    assert (
        "An hour costs l4x1 $0.80 as standard, spot $0.30 as spot. Google may take spot machines"
        " away" in words
    )


def test_a_run_of_the_desk_is_one_of_this_computer_without_a_price(tmp_path: Path) -> None:
    cpu = {"name": "cpu", "machine_type": "n1-standard-8", "price_per_hour": 0.4}
    comparison(tmp_path, "strong", cpu, cpu={"seconds": noisy(0.1), "devices": ("CPU:0",)})
    edit(tmp_path / "cpu" / "repeat-1" / "run.json", processor="EPYC")
    row = rows_of(tmp_path)["cpu"]
    assert (row.machine, row.kind) == ("this computer (EPYC)", "CPU")
    assert {row.price_per_hour, row.cost, row.paid, row.efficiency} == {None}


def test_only_images_that_are_decoded_are_said_to_need_preparing(tmp_path: Path) -> None:
    for name in ("files", "table"):
        plant(tmp_path / name, noisy(0.1), waited=0.3)
    edit(tmp_path / "files" / "run.json", data={"converted": {}, "examples_per_step": 100})
    words = words_of(tmp_path)
    assert (
        "files: waiting for input 30 %: prepare the data (python -m trainer.data.prepare)." in words
    )
    assert "table: waiting for input 30 %." in words


def test_noise_is_called_equal_and_a_difference_is_not(tmp_path: Path) -> None:
    plant(tmp_path / "a", noisy(0.100))
    plant(tmp_path / "b", noisy(0.102), devices=("GPU:0", "GPU:1"))
    words = words_of(tmp_path)
    assert re.search(r"Fastest: a, .* images/s; equal within the spread: b\.", words)
    plant(tmp_path / "c", noisy(0.080))  # faster by more than the spread
    assert re.search(r"Fastest: c, .* images/s, 1.25 x a\.", words_of(tmp_path))


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
            (
                "agree within 17 %, which is less than the loss changes between reports: loss 0.500"
                " to 0.600."
            ),
        ),
        (
            [loss * 1.5 for loss in FALLING],
            "Different final losses: loss 0.750 on b, 0.500 on a: rounding alone can",
        ),
    ],
    ids=["equal", "close", "noise", "different"],
)
def test_final_losses_are_compared(other: list[float], words: str, tmp_path: Path) -> None:
    for name, losses in (("a", FALLING), ("b", other)):
        plant(tmp_path / name, noisy(0.1), losses=losses)
    assert words in words_of(tmp_path)
    assert words_of(tmp_path).count("inal losses") == 1


def test_different_work_and_settings_are_reported(tmp_path: Path) -> None:
    for name, count in (("a", 20), ("b", 20), ("short", 19)):
        plant(tmp_path / name, noisy(0.1, count))
    changed = {"model": "mlp", "global_batch_size": 100, "learning_rate": 0.2, "seed": 0}
    edit(tmp_path / "short" / "run.json", config=changed)
    words = words_of(tmp_path)
    differing = "steps is 200 (a, b), 190 (short); learning_rate is 0.1 (a, b), 0.2 (short)."
    assert words.startswith(f"Not ranked, because the runs did different work: {differing}")
    assert not re.search("Buy|Fastest|inal losses|as fast", words)
    assert [row.speed_up for row in rows_of(tmp_path).values()] == [1.0, 1.0, None]


def test_weak_scaling_has_an_efficiency_and_compares_no_losses(tmp_path: Path) -> None:
    comparison(
        tmp_path,
        "weak",
        L4X1,
        L4X2,
        l4x1={"seconds": noisy(0.1), "losses": [1.0] * 20},
        l4x2={"seconds": noisy(0.125), "devices": ("GPU:0", "GPU:1"), "batch": 200},
    )
    row = rows_of(tmp_path)["l4x2"]
    assert (row.speed_up, row.efficiency) == (
        pytest.approx(1.6, rel=0.01),
        pytest.approx(0.8, rel=0.01),
    )
    assert "inal losses" not in words_of(tmp_path)


def test_devices_are_compared_with_their_own_kind(tmp_path: Path) -> None:
    """Shows that two slow devices against one fast one are no measure of scaling."""
    comparison(
        tmp_path,
        "strong",
        {**L4X1, "name": "a100", "accelerator_type": "NVIDIA_TESLA_A100"},
        L4X1,
        L4X2,
        a100={"seconds": noisy(0.01), "gpu": "NVIDIA A100-SXM4-40GB"},
        l4x1={"seconds": noisy(0.1), "gpu": "NVIDIA L4"},
        l4x2={"seconds": noisy(0.05), "gpu": "NVIDIA L4", "devices": ("GPU:0", "GPU:1")},
    )
    rows = rows_of(tmp_path)
    assert (rows["l4x2"].speed_up, rows["l4x2"].efficiency) == (pytest.approx(0.2), None)
    assert rows_of(tmp_path, "l4x1")["l4x2"].efficiency == pytest.approx(1)


def test_simulated_devices_are_marked_and_have_times_but_neither_efficiency_nor_cost(
    tmp_path: Path,
) -> None:
    comparison(
        tmp_path,
        "strong",
        L4X1,
        L4X2,
        l4x1={"seconds": noisy(0.1), "devices": ("CPU:0",)},
        l4x2={"seconds": noisy(0.15), "devices": ("CPU:0", "CPU:1")},
    )
    priced: Any = {"l4x1": 1.0, "l4x2": 2.0}
    for prices in ({}, priced):
        one, two = rows_of(tmp_path, **prices).values()
        assert two.speed_up is None
        for row in (one, two):
            keys = (
                "step_seconds",
                "images_per_second",
                "total_seconds",
                "efficiency",
                "cost",
                "price_per_hour",
            )
            assert {row.values[key] for key in keys} == {None}
            assert (row.machine, row.final_loss) == ("this computer", pytest.approx(0.05))
        words = words_of(tmp_path, **prices)
        simulated = (
            "Simulated devices: l4x1, l4x2: their speeds do not apply to real machines, so they are"
            " not shown."
        )
        assert words.startswith(
            f"The final losses are equal up to rounding: loss 0.0500.\n{simulated}"
        )
        for claim in ("Fastest", "Best buy", "Not ranked"):
            assert claim not in words
    remarks = [*notes([one, two], collect([str(tmp_path)]))]
    assert [row.simulated for row in (one, two)] == ["NVIDIA_L4 simulated on a CPU"] * 2
    forms = to_markdown([one, two], remarks), to_json([one, two], [], [])
    assert all("simulated" in text.lower() for text in forms)
    assert not re.search("images/s|speed-up|paid", to_terminal([one, two]))


def test_an_unknown_machine_is_not_guessed(tmp_path: Path) -> None:
    comparison(tmp_path, "strong", L4X1, L4X2)
    for name, seconds in (("l4x1", 0.1), ("l4x2", 0.2)):
        (plant(tmp_path / name / "repeat-1", noisy(seconds)) / "run.json").write_text("{}")
    for row in rows_of(tmp_path).values():
        assert (row.kind, row.efficiency, row.cost) == ("unknown", None, None)
        assert row.price_per_hour is None


def test_the_three_forms_hold_the_same_values(tmp_path: Path) -> None:
    plant(tmp_path / "a|b", noisy(0.1))
    plant(tmp_path / "c", noisy(0.05), devices=("GPU:0", "GPU:1"), tflop=1.0)
    collection = collect([str(tmp_path)])
    rows = summarize(collection, usd_by_tier={"c": 2.0})
    remarks = [*notes(rows, collection)]
    content = json.loads(to_json(rows, remarks, ["words"]))
    assert [tier["tier"] for tier in content["tiers"]] == ["a|b", "c"]
    assert content["tiers"][1]["step_seconds"]["median"] == rows[1].step_seconds.median
    assert content["tiers"][0]["cost"] is None
    markdown = to_markdown(rows, remarks).splitlines()
    assert markdown[2].startswith(r"| a\|b | done |")
    titled = [measure for measure in MEASURES if measure.title]
    full = [
        column.title
        for column in titled
        if all(getattr(row, column.key) is not None for row in rows)
    ]
    assert [title for title in full if title not in "".join(map(str, shown(rows)))] == []
    assert len(to_terminal(rows).splitlines()) <= 9
    assert rows[0].mfu is None
    assert rows[1].mfu == pytest.approx(1 / rows[1].step_seconds.median / 494)
    assert re.search(r"'MFU', '', '4\.\d %'", str(shown(rows)))
    assert "FID" not in "".join([markdown[0], *remarks])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (12345, "12,300"),
        (8.1, "8.10"),
        (0.0078601, "0.00786"),
        (999.96, "1,000"),
        (-8.16, "-8.16"),
        (99.95, "100"),
        (1e-12, "0.00000000000100"),
    ],
)
def test_figures(value: float, text: str) -> None:
    assert figures(value) == text


def test_images_measured_in_unlike_ways_are_not_put_side_by_side(tmp_path: Path) -> None:
    about = {"features": "a.keras", "features_sha256": "1f", "samples": 100, "formulas": 1}
    for run, quality, measured in (
        ("one/repeat-1", about, {"fid": 30, "coverage": 0.5}),
        ("same/repeat-1", {**about, "features": "b.keras"}, {"fid": 20}),
        ("other/repeat-1", {**about, "samples": 99}, dict.fromkeys(QUALITY, 10.0)),
        ("mixed/repeat-1", about, {"fid": 10}),
        ("mixed/repeat-2", {**about, "features_sha256": "2f"}, {"fid": 10}),
    ):
        plant(tmp_path / run, noisy(0.1), quality=quality, **measured)
    rows = rows_of(tmp_path, baseline="one")
    assert {name: row.fid for name, row in rows.items()} == {
        "one": 30,
        "same": 20,
        "other": None,
        "mixed": None,
    }
    assert rows["one"].coverage == 0.5
    assert {name: getattr(rows["other"], name) for name in QUALITY} == dict.fromkeys(QUALITY)
    assert rows["other"].missing[-1].startswith("its features, images or formulas differ")
