"""Runs the check of GPUs on logical CPU devices; only NCCL and real cards are missing."""

import re
from typing import Any

import pytest
import tensorflow as tf

from tests.fixtures import Capture, Patch
from tests.support import fresh_collectives, refused, small
from trainer import check as command
from trainer.base.log import start_logging
from trainer.cluster.strategy import make_replicas
from trainer.proofs import on_gpus
from trainer.proofs.on_gpus import check_on_gpus, variants
from trainer.proofs.rates import all_reduces
from trainer.proofs.variants import Trials, Variant

MLP = ("--model=mlp", "--width=8", "--replicas=2", "--learning_rate=1e-3")


def checked(*flags: str) -> tuple[int, dict[str, Any]]:
    """Returns the exit code and the content of gpu_check.json."""
    fresh_collectives()
    start_logging()
    written: list[dict[str, Any]] = []
    code = check_on_gpus(small(*flags), lambda content: written.append(content) or "here", seconds=0)
    return code, written[0]


@pytest.mark.slow
def test_all_variants_agree_on_logical_devices(capsys: Capture) -> None:
    code, found = checked(*MLP)
    shown = capsys.readouterr().out
    assert (code, found["agrees"], found["problems"]) == (0, True, []), shown
    assert [(row["name"], row["devices"]) for row in found["rows"]] == [
        ("float32", 1), ("float32", 2), ("float32, TF32", 1), ("float32, TF32", 2), ("float32, XLA", 1),
        ("mixed_bfloat16", 1), ("mixed_bfloat16", 2), ("mixed_float16", 1), ("mixed_float16", 2),
    ]  # fmt: skip
    for row in found["rows"]:
        assert row["difference"]["weights"] > 0 or row["name"].startswith("float32")
        assert row["speed"]["steps_per_second"] > 0
        assert row["speed"]["peak_device_memory_gib"][0] > 0
    alone = found["rows"][0]
    assert 0 < found["rows"][1]["difference"]["weights"] <= 3 * found["control"]["weights"]
    assert found["float32_of_cpu"]["weights"] == alone["difference"]["weights"]
    assert found["left_out"] == ["XLA on several devices: it cannot sum over CPUs"]
    assert [one["bytes"] for one in found["all_reduces"]] == sorted({one["bytes"] for one in found["all_reduces"]})
    assert "mixed_float16" in shown
    assert shown.endswith("all agree; the numbers are in here\n")


def test_a_model_that_depends_on_replicas_does_not_agree(monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setattr(on_gpus, "variants", lambda count, on_gpus: ([Variant("float32", count)], []))
    code, found = checked("--model=tests.models:mean_loss", "--replicas=2")
    assert (code, found["agrees"]) == (2, False)
    assert [bool(row["problem"]) for row in found["rows"]] == [False, True]
    assert re.search("error: float32 on 2: .*losses differ by", capsys.readouterr().err)


def test_a_variant_that_fails_is_a_line_and_the_others_run(monkeypatch: Patch) -> None:
    run = Trials.run

    def fails(self: Trials, variant: Variant, *arguments: Any) -> Any:
        if variant.name == "fails":
            raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating")
        return run(self, variant, *arguments)

    monkeypatch.setattr(Trials, "run", fails)
    kinds = [Variant("fails", 1), Variant("float32, XLA", 1, jit_compile="true")]
    monkeypatch.setattr(on_gpus, "variants", lambda count, on_gpus: (kinds, []))
    code, content = checked("--model=mlp", "--width=8", "--replicas=1")
    _, failed, other = content["rows"]
    assert (code, failed["difference"], failed["speed"]) == (2, None, None)
    assert "OOM when allocating" in failed["problem"]
    assert (other["problem"], other["against"]) == ("", "float32 on one")


def test_what_is_compared_depends_on_cards_and_count(monkeypatch: Patch) -> None:
    found, left_out = variants(1, on_gpus=False)
    assert [one.name for one in found] == ["float32, TF32", "float32, XLA", "mixed_bfloat16", "mixed_float16"]
    assert left_out == ["several devices: there is one"]
    monkeypatch.setattr(on_gpus, "half_precision", lambda: "mixed_float16")
    for real in (True, False):
        found, left_out = variants(4, on_gpus=real)
        assert [(one.name, one.devices) for one in found] == [
            ("float32", 4), ("float32, TF32", 1), ("float32, TF32", 4), ("float32, XLA", 1),
            *[("float32, XLA", 4)] * real, ("mixed_float16", 1), ("mixed_float16", 4),
        ]  # fmt: skip
        assert [line.partition(":")[0] for line in left_out] == (
            ["mixed_bfloat16"] + ["XLA on several devices"] * (not real)
        )


def test_rates_are_measured() -> None:
    fresh_collectives()
    replicas = make_replicas(small("--replicas=2"))
    found, kind = all_reduces(replicas, 0, sizes=(1024, 4096))
    assert [(one.bytes, one.seconds > 0) for one in found] == [(1024, True), (4096, True)]
    assert found[0].bus_bytes_per_second == pytest.approx(1024 / found[0].seconds)
    assert kind != "none"


def test_the_flags_of_the_check() -> None:
    own, request = command.parse(["--on-gpus", "--seconds", "7", "--model", "mlp", "--replicas=2"])
    assert (own.on_gpus, own.seconds, request.config.model, request.config.replicas) == (True, 7, "mlp", 2)
    assert command.parse(["--model=mlp"])[0].on_gpus is False
    with refused("unknown flag --on_gpu"):
        command.parse(["--on_gpu"])
    with refused("'-1' is not a whole number from 0 to 600"):
        command.parse(["--on_gpus", "--seconds=-1"])
