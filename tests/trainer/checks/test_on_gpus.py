"""Runs the check of GPUs on logical CPU devices; only NCCL and real cards are missing."""

import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.fixtures import Capture, Patch
from tests.support import classifier_of, run_steps, small
from trainer import check as command
from trainer.base.errors import DONE, USER_MUST_CHANGE
from trainer.base.log import start_logging
from trainer.base.settings.train_config import TrainConfig
from trainer.checks import on_gpus
from trainer.checks.on_gpus import (
    BANDS,
    Trained,
    Variant,
    check_on_gpus,
    differences,
    float32_limits,
    largest_of_each,
    too_far,
    variants,
)
from trainer.cluster.strategy import make_replicas
from trainer.data.dataset import Dataset
from trainer.invariance.gradients import all_reduce_sum
from trainer.training.checkpoint import snapshot, variables_of

MLP = ("--model=mlp", "--width=8", "--replicas=2", "--learning_rate=1e-3")


def checked(monkeypatch: Patch, kinds: list[Variant], *flags: str) -> dict[str, Any]:
    """Returns the content of gpu_check.json, of these variants alone."""
    monkeypatch.setattr(on_gpus, "variants", lambda count: (kinds, []))
    start_logging()
    return check_on_gpus(small(*flags), seconds=0)


@pytest.mark.slow
def test_all_variants_agree_on_logical_devices(
    capsys: Capture, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = [
        "--data=digits",
        "--image_size=16",
        "--global_batch_size=16",
        "--on_gpus",
        "--seconds=0",
    ]
    assert command.main([*flags, *MLP]) == DONE
    found = json.loads((tmp_path / "gpu_check.json").read_text())
    shown = capsys.readouterr().out
    assert found["agrees"], shown
    assert [(row["name"], row["devices"]) for row in found["rows"]] == [
        ("float32", 1),
        ("float32", 2),
        ("float32, TF32", 1),
        ("float32, TF32", 2),
        ("float32, XLA", 1),
        ("float32, XLA", 2),
        ("mixed_bfloat16", 1),
        ("mixed_bfloat16", 2),
        ("mixed_float16", 1),
        ("mixed_float16", 2),
    ]
    for row in found["rows"]:
        assert row["difference"]["weights"] > 0 or row["name"].startswith("float32")
        assert row["cost"]["steps_per_second"] > 0
        # not every CPU counts it
        assert row["cost"]["peak_gib"] is None or row["cost"]["peak_gib"] > 0
        assert row["cost"]["sums"].startswith("CollectiveReduceV2") is (row["devices"] == 2)
    alone = found["rows"][0]
    assert found["rows"][-1]["limits"] == {
        "losses": BANDS["mixed_float16"],
        "gradients": BANDS["mixed_float16"],
    }
    assert 0 < found["rows"][1]["difference"]["weights"] <= 3 * found["control"]["weights"]
    assert found["float32_of_cpu"]["weights"] == alone["difference"]["weights"]
    assert [line.partition(":")[0] for line in found["left_out"]] == ["the same steps twice"]
    assert "mixed_float16" in shown
    assert shown.endswith("all agree; the numbers are in gpu_check.json\n")


@pytest.mark.slow
def test_a_model_that_depends_on_replicas_does_not_agree(
    monkeypatch: Patch, capsys: Capture
) -> None:
    found = checked(
        monkeypatch, [Variant("float32", 2)], "--model=tests.models:mean_loss", "--replicas=2"
    )
    assert not found["agrees"]
    assert [bool(row["problem"]) for row in found["rows"]] == [False, True]
    assert re.search("error: float32 on 2: .*losses differ by", capsys.readouterr().err)


@pytest.mark.slow
def test_gpus_that_sum_without_nccl_are_a_problem(monkeypatch: Patch) -> None:
    monkeypatch.setattr(on_gpus, "variants", lambda count: ([Variant("float32", count)], []))
    config = small(*MLP)
    alone, both = on_gpus.checked(
        config, replace(make_replicas(config), collectives="nccl"), 0
    ).rows
    assert alone.problem == ""
    assert both.problem.startswith("gradients are summed by CollectiveReduceV2 (ring), not by NCCL")


@pytest.mark.parametrize("broken", [(), ("CPU:1", "CPU:2")])
def test_devices_that_add_wrongly_are_named(broken: tuple[str, ...], monkeypatch: Patch) -> None:
    """A NaN is planted in one number that one replica gets, of each sum in which both take part."""

    def planted(tensors: Any) -> Any:
        (total,) = all_reduce_sum(tensors)
        replica = tf.distribute.get_replica_context()
        used = {device[-5:] for device in replica.strategy.extended.worker_devices}
        if not (broken and used.issuperset(broken)):
            return [total]
        last = replica.replica_id_in_sync_group == replica.num_replicas_in_sync - 1
        nan = tf.one_hot(12_345, tf.size(total), on_value=math.nan, off_value=0.0)
        return [tf.where(last, total + nan, total)]

    monkeypatch.setattr(on_gpus, "all_reduce_sum", planted)
    expected = ["CPU:0 and CPU:1 and CPU:2", "CPU:1 and CPU:2"] if broken else []
    assert on_gpus.wrong_sums(("CPU:0", "CPU:1", "CPU:2")) == expected


@pytest.mark.slow
def test_cards_that_add_wrongly_do_not_agree(monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setattr(on_gpus, "wrong_sums", lambda devices: [" and ".join(devices)])
    assert not checked(monkeypatch, [], *MLP)["agrees"]
    assert "error: known sums on 2: CPU:0 and CPU:1 add known" in capsys.readouterr().err


@pytest.mark.slow
def test_a_variant_that_fails_is_a_line_and_the_others_run(monkeypatch: Patch) -> None:
    run = on_gpus.first_steps

    def fails(
        config: Any, dataset: Any, start: Any, variant: Variant, *arguments: Any, **options: Any
    ) -> Any:
        if variant.name == "fails":
            raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating")
        return run(config, dataset, start, variant, *arguments, **options)

    monkeypatch.setattr(on_gpus, "first_steps", fails)
    kinds = [Variant("fails", 1), Variant("float32, XLA", 1, jit_compile="true")]
    content = checked(monkeypatch, kinds, "--model=mlp", "--width=8", "--replicas=1")
    _, failed, other = content["rows"]
    assert (content["agrees"], failed["difference"], failed["cost"]) == (False, None, None)
    assert "OOM when allocating" in failed["problem"]
    assert (other["problem"], other["against"]) == ("", "float32 on one")


def test_what_is_compared_depends_on_cards_and_count(monkeypatch: Patch) -> None:
    found, left_out = variants(1)
    assert [one.name for one in found] == [
        "float32, TF32",
        "float32, XLA",
        "mixed_bfloat16",
        "mixed_float16",
    ]
    assert left_out == ["several devices: there is one"]
    monkeypatch.setattr(on_gpus, "half_precision", lambda: "mixed_float16")
    found, left_out = variants(4)
    assert [(one.name, one.devices) for one in found] == [
        ("float32", 4),
        ("float32, TF32", 1),
        ("float32, TF32", 4),
        ("float32, XLA", 1),
        ("float32, XLA", 4),
        ("mixed_float16", 1),
        ("mixed_float16", 4),
    ]
    assert [line.partition(":")[0] for line in left_out] == ["mixed_bfloat16"]


BUILT = itertools.count(1)


def another_each_time(config: TrainConfig, dataset: Dataset) -> keras.Model:
    """Returns a classifier that learns faster the later it is built."""
    return classifier_of(
        dataset.image_shape,
        keras.layers.Flatten(),
        optimizer=keras.optimizers.SGD(1e-4 * next(BUILT)),
    )


@pytest.mark.parametrize(
    ("model", "equal"),
    [
        pytest.param("mlp", True, marks=pytest.mark.slow),
        ("tests.trainer.checks.test_on_gpus:another_each_time", False),
    ],
)
def test_with_deterministic_the_same_steps_must_give_the_same_bits(
    model: str, equal: bool, monkeypatch: Patch
) -> None:
    # of the whole process
    monkeypatch.setattr(tf.config.experimental, "enable_op_determinism", lambda: None)
    found = checked(monkeypatch, [], f"--model={model}", "--replicas=1", "--deterministic")
    assert found["rows"][-1]["name"] == "float32, again"
    assert (found["rows"][-1]["problem"] == "") is found["agrees"] is equal
    assert found["left_out"] == []


def trained(after: float = 1.0, loss: float = -4.0, norm: float = 10.0) -> Trained:
    return Trained(
        {"trained": np.zeros(4)},
        {"trained": np.full(4, after)},
        {"loss": loss, "small_loss": 0.001},
        norm,
    )


def test_weights_are_compared_with_how_far_they_moved() -> None:
    """Moving statistics that change by more do not hide it, and frozen weights have to be equal."""
    start = {"trained": np.full(4, 99.0), "others": np.zeros(4), "frozen": np.ones(4)}
    moved = Trained(
        start, {**start, "trained": np.full(4, 100.0), "others": np.full(4, 1e9)}, {}, 1.0
    )
    for changed, expected in (
        ({"trained": np.full(4, 100.5)}, 0.5),
        ({}, 0.0),
        ({"frozen": np.zeros(4)}, 2e300),
    ):
        other = Trained(start, {**moved.after, **changed}, {}, 1.0)
        assert differences(other, moved)["weights"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("after", "control", "agrees"),
    [
        (1.0 + 2.9e-4, 1e-4, True),
        (1.0 + 3.1e-4, 1e-4, False),
        (1.0 + 2e-7, 0.0, True),
        (math.nan, 1e-4, False),
    ],
)
def test_float32_may_differ_by_three_times_the_control(
    after: float, control: float, agrees: bool
) -> None:
    limits = float32_limits({"weights": control, "losses": 0.0, "gradients": 0.0})
    found = too_far(differences(trained(after), trained()), limits)
    assert (found == "") is agrees
    assert agrees or found.startswith("weights differ by ")


def test_a_loss_that_is_doubled_does_not_agree_in_float32() -> None:
    """Adam makes the same steps of doubled gradients: the weights alone would not show it."""
    # of the largest, not of its own
    assert differences(trained(loss=-4.4), trained())["losses"] == pytest.approx(0.1)
    control = largest_of_each(
        [differences(one, trained()) for one in (trained(1.001, norm=10.001), trained(1.002))]
    )
    assert (control["weights"], control["gradients"]) == (pytest.approx(2e-3), pytest.approx(1e-4))
    for other, kind in ((trained(loss=-8.0), "losses"), (trained(norm=20.0), "gradients")):
        assert too_far(differences(other, trained()), float32_limits(control)).startswith(
            f"{kind} differ"
        )


def test_the_command_fails_where_a_variant_disagrees(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(on_gpus, "check_on_gpus", lambda *arguments: {"agrees": False})
    assert command.main(["--on_gpus", "--model=mlp", "--data=digits"]) == USER_MUST_CHANGE
    assert json.loads(Path("gpu_check.json").read_text()) == {"agrees": False}


class Masked(keras.layers.Layer):
    """Sets rows to 0 at random; what it gives has a first axis of unknown size."""

    def build(self, shape: Any) -> None:
        self.draws = keras.random.SeedGenerator(5)

    def call(self, x: Any, training: bool = False) -> Any:
        drawn = keras.random.uniform((keras.ops.shape(x)[0], 1), seed=self.draws)
        return keras.ops.where(drawn < 0.5, keras.ops.zeros_like(x), x) if training else x


def masked(config: TrainConfig, dataset: Dataset) -> keras.Model:
    layers = [
        keras.layers.Flatten(),
        Masked(),
        keras.layers.Dense(8),
        keras.layers.Dropout(0.5, seed=1),
    ]
    return classifier_of(dataset.image_shape, *layers)


def test_rows_in_another_order_change_no_more_than_rounding() -> None:
    """Layers draw the same for a row, wherever it stands: else the control would hide what has
    changed."""
    config = small(f"--model={__name__}:masked", "--precision=float64")
    weights = []
    for order in (None, 7):
        model, _ = run_steps(config, 2, order)
        weights.append(snapshot(variables_of(model)))
    for name, values in weights[0].items():
        np.testing.assert_allclose(weights[1][name], values, rtol=1e-10, atol=1e-12, err_msg=name)
