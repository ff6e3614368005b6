"""Runs the check of GPUs on logical CPU devices; only NCCL and real cards are missing."""

import itertools
import re
from dataclasses import replace
from typing import Any

import keras
import pytest
import tensorflow as tf

from tests.fixtures import Capture, Patch
from tests.support import refused, small
from trainer import check as command
from trainer.base.log import start_logging
from trainer.base.settings.train_config import TrainConfig
from trainer.cluster.strategy import make_replicas
from trainer.data.dataset import Dataset
from trainer.proofs import on_gpus
from trainer.proofs.on_gpus import Trials, Variant, check_on_gpus, variants

MLP = ("--model=mlp", "--width=8", "--replicas=2", "--learning_rate=1e-3")


def checked(*flags: str) -> tuple[int, dict[str, Any]]:
    """Returns the exit code and the content of gpu_check.json."""
    start_logging()
    written: list[dict[str, Any]] = []
    code = check_on_gpus(small(*flags), lambda content: written.append(content) or "here", seconds=0)
    return code, written[0]


@pytest.mark.slow
def test_all_variants_agree_on_logical_devices(capsys: Capture) -> None:
    code, found = checked(*MLP)
    shown = capsys.readouterr().out
    assert (code, found["agrees"]) == (0, True), shown
    assert [(row["name"], row["devices"]) for row in found["rows"]] == [
        ("float32", 1), ("float32", 2), ("float32, TF32", 1), ("float32, TF32", 2), ("float32, XLA", 1),
        ("mixed_bfloat16", 1), ("mixed_bfloat16", 2), ("mixed_float16", 1), ("mixed_float16", 2),
    ]  # fmt: skip
    for row in found["rows"]:
        assert row["difference"]["weights"] > 0 or row["name"].startswith("float32")
        assert row["cost"]["steps_per_second"] > 0
        assert row["cost"]["peak_gib"] is None or row["cost"]["peak_gib"] > 0  # not every CPU counts it
        assert row["cost"]["sums"].startswith("CollectiveReduceV2") is (row["devices"] == 2)
    alone = found["rows"][0]
    assert 0 < found["rows"][1]["difference"]["weights"] <= 3 * found["control"]["weights"]
    assert found["float32_of_cpu"]["weights"] == alone["difference"]["weights"]
    assert [line.partition(":")[0] for line in found["left_out"]] == ["XLA on several devices", "the same steps twice"]
    assert "mixed_float16" in shown
    assert shown.endswith("all agree; the numbers are in here\n")


@pytest.mark.slow
def test_a_model_that_depends_on_replicas_does_not_agree(monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setattr(on_gpus, "variants", lambda count, nccl: ([Variant("float32", count)], []))
    code, found = checked("--model=tests.models:mean_loss", "--replicas=2")
    assert (code, found["agrees"]) == (2, False)
    assert [bool(row["problem"]) for row in found["rows"]] == [False, True]
    assert re.search("error: float32 on 2: .*losses differ by", capsys.readouterr().err)


def test_gpus_that_sum_without_nccl_are_a_problem(monkeypatch: Patch) -> None:
    monkeypatch.setattr(on_gpus, "variants", lambda count, nccl: ([Variant("float32", count)], []))
    config = small(*MLP)
    alone, both = on_gpus.checked(config, replace(make_replicas(config), collectives="nccl"), 0).rows
    assert (alone.problem, both.difference and both.difference.problem) == ("", "")
    assert both.problem.startswith("gradients are summed by CollectiveReduceV2 (ring), not by NCCL")


@pytest.mark.slow
def test_a_variant_that_fails_is_a_line_and_the_others_run(monkeypatch: Patch) -> None:
    measured = Trials.measured

    def fails(self: Trials, variant: Variant, *arguments: Any) -> Any:
        if variant.name == "fails":
            raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating")
        return measured(self, variant, *arguments)

    monkeypatch.setattr(Trials, "measured", fails)
    kinds = [Variant("fails", 1), Variant("float32, XLA", 1, jit_compile="true")]
    monkeypatch.setattr(on_gpus, "variants", lambda count, nccl: (kinds, []))
    code, content = checked("--model=mlp", "--width=8", "--replicas=1")
    _, failed, other = content["rows"]
    assert (code, failed["difference"], failed["cost"]) == (2, None, None)
    assert "OOM when allocating" in failed["problem"]
    assert (other["problem"], other["against"]) == ("", "float32 on one")


def test_what_is_compared_depends_on_cards_and_count(monkeypatch: Patch) -> None:
    found, left_out = variants(1, nccl=False)
    assert [one.name for one in found] == ["float32, TF32", "float32, XLA", "mixed_bfloat16", "mixed_float16"]
    assert left_out == ["several devices: there is one"]
    monkeypatch.setattr(on_gpus, "half_precision", lambda: "mixed_float16")
    for nccl in (True, False):
        found, left_out = variants(4, nccl=nccl)
        assert [(one.name, one.devices) for one in found] == [
            ("float32", 4), ("float32, TF32", 1), ("float32, TF32", 4), ("float32, XLA", 1),
            *[("float32, XLA", 4)] * nccl, ("mixed_float16", 1), ("mixed_float16", 4),
        ]  # fmt: skip
        assert [line.partition(":")[0] for line in left_out] == (
            ["mixed_bfloat16"] + ["XLA on several devices"] * (not nccl)
        )


BUILT = itertools.count(1)


def another_each_time(config: TrainConfig, dataset: Dataset) -> keras.Model:
    """Returns a classifier that learns faster the later it is built."""
    model = keras.Sequential([keras.Input(dataset.image_shape), keras.layers.Flatten(), keras.layers.Dense(10)])
    model.compile(
        keras.optimizers.SGD(1e-4 * next(BUILT)), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    return model


@pytest.mark.parametrize(("model", "equal"), [
    ("mlp", True), ("tests.trainer.proofs.test_on_gpus:another_each_time", False),
])  # fmt: skip
def test_with_deterministic_the_same_steps_must_give_the_same_bits(model: str, equal: bool, monkeypatch: Patch) -> None:
    monkeypatch.setattr(tf.config.experimental, "enable_op_determinism", lambda: None)  # of the whole process
    monkeypatch.setattr(on_gpus, "variants", lambda count, nccl: ([], []))
    code, found = checked(f"--model={model}", "--replicas=1", "--deterministic")
    assert found["rows"][-1]["name"] == "float32, again"
    assert (found["rows"][-1]["problem"] == "") is equal
    assert (code == 0) is equal
    assert found["left_out"] == []


def test_the_flags_of_the_check() -> None:
    own, request = command.parse(["--on-gpus", "--seconds", "7", "--model", "mlp", "--replicas=2"])
    assert (own.on_gpus, own.seconds, request.config.model, request.config.replicas) == (True, 7, "mlp", 2)
    assert command.parse(["--model=mlp"])[0].on_gpus is False
    with refused("unknown flag --on_gpu"):
        command.parse(["--on_gpu"])
    with refused("'-1' is not a whole number from 0 to 600"):
        command.parse(["--on_gpus", "--seconds=-1"])
