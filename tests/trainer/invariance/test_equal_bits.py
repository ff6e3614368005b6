"""Tests that --virtual_replicas gives the same bits on any number of replicas, where a plain run
does not."""

from pathlib import Path
from typing import Any

import pytest
from keras import Model, layers

from tests import workers
from tests.fixtures import SLOW, Capture, Patch, parametrize
from tests.support import classifier_of, refused, run_job, run_steps, slow, small
from trainer import check
from trainer.base.errors import DONE, USER_MUST_CHANGE
from trainer.base.run_files.job_files import read_result, read_run_info
from trainer.base.settings.train_config import TrainConfig
from trainer.data.dataset import Dataset
from trainer.run.replica_check import ReplicaVerdict, compare_few_rows
from trainer.training.checkpoint import digest_of, snapshot, variables_of

FOUR = "--virtual_replicas=4"
# Dropout, augmentation, clipping of the sum and decay; masks, an embedding and attention.
MLP = ("--model=mlp", "--dropout=0.3", "--augment=flip,crop")
TEXT = (
    "--model=tests.own_data:masked_text",
    "--data=tests.own_data:next_tokens",
    "--learning_rate=0.01",
)
NORMAL = ("--model=tests.trainer.invariance.test_micro_batches:normalised",)


class Norm(layers.BatchNormalization):
    """Has a `call` of its own, which moves the averages in each micro-batch."""

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        return super().call(inputs, training=training, mask=mask)


def own_norm(config: TrainConfig, dataset: Dataset) -> Model:
    return classifier_of(dataset.image_shape, Norm(), layers.Flatten())


def swished(config: TrainConfig, dataset: Dataset) -> Model:
    """Returns convolutions with swish, which TensorFlow's graph optimizer would fuse in some
    graphs."""
    convolutions = [
        layers.Conv2D(8, 3, activation="swish"),
        layers.DepthwiseConv2D(3, activation="swish"),
    ]
    return classifier_of(dataset.image_shape, *convolutions, layers.GlobalAveragePooling2D())


def digest(replicas: int, *flags: str) -> str:
    model, _ = run_steps(small(*flags, f"--replicas={replicas}"), 3)
    return digest_of(snapshot(variables_of(model)))


@parametrize(
    "flags",
    [
        slow(MLP, id="mlp"),
        pytest.param(NORMAL, id="batch norm"),
        slow((f"--model={__name__}:swished",), id="swish"),
        slow(TEXT, id="masks"),
        slow((*NORMAL, "--precision=mixed_bfloat16"), id="bfloat16"),
    ],
)
def test_all_variables_have_the_same_bits(flags: tuple[str, ...]) -> None:
    assert len({digest(count, *flags, FOUR) for count in (1, 2)}) == 1


@SLOW
def test_a_run_resumed_on_more_replicas_says_its_digest(tmp_path: Path) -> None:
    shared = ("--model=mlp", "--dropout=0.3", "--jit_compile=false", FOUR)
    straight = run_job(
        small(*shared, "--steps=4", "--replicas=2", f"--job_dir={tmp_path / 'straight'}")
    )
    for steps, replicas in ((2, 1), (4, 4)):
        resumed = run_job(
            small(
                *shared,
                f"--steps={steps}",
                f"--replicas={replicas}",
                f"--job_dir={tmp_path / 'two'}",
            )
        )
    bits = [read_result(folder)[0]["equal_bits"] for folder in (straight, resumed)]
    assert bits[0] == bits[1]
    about = read_run_info(resumed)[0]
    assert (about["equal_bits"], about["batch"]) == (
        4,
        "global batch 16 = 4 replicas x 1 of 4 virtual replicas x 4",
    )
    with refused("virtual_replicas"):
        run_job(
            small(
                *shared[:-1], "--virtual_replicas=2", "--steps=6", f"--job_dir={tmp_path / 'two'}"
            )
        )


@SLOW
def test_two_workers_have_the_bits_of_one_process(tmp_path: Path) -> None:
    flags = [
        "--recipe=mlp_mnist",
        "--data=digits",
        "--global_batch_size=16",
        "--steps=4",
        "--tensorboard=false",
        FOUR,
    ]
    digests = set()
    for count in (1, 2):
        folder = tmp_path / f"run{count}"
        assert (
            workers.run(count, [*flags, f"--job_dir={folder}"], folder.with_suffix(".log"))
            == [DONE] * count
        )
        digests.add(read_result(folder)[0]["equal_bits"]["sha256"])
    assert len(digests) == 1


@parametrize(
    "model, line",
    [
        ("mixed_rows", "/mix_up mixes the rows of one replica: drop that, or"),
        (
            "own_norm",
            (
                "moves its averages in each micro-batch, by code of its own: drop that, or"
                " --virtual_replicas"
            ),
        ),
        (
            "mean_loss",
            (
                "virtual_replicas=4: the train_step of _MeanLoss takes all rows at once: sum its"
                " gradients by"
            ),
        ),
    ],
)
def test_what_cannot_be_cut_is_refused(model: str, line: str) -> None:
    with refused(line):
        run_steps(
            small(f"--model={__name__ if model in globals() else 'tests.models'}:{model}", FOUR), 1
        )


def test_the_check_compares_bits(monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setattr("tensorflow.config.set_logical_device_configuration", lambda *_: None)
    flags = ["--model=mlp", "--data=digits", "--image_size=16", "--global_batch_size=16", "--bits"]
    assert check.main(flags) == USER_MUST_CHANGE
    assert check.main([*flags, "--virtual_replicas=2"]) == DONE
    output = "".join(capsys.readouterr())
    assert (
        "--bits: a plain run has equal bits on one number of replicas alone: add"
        " --virtual_replicas=4" in output
    )
    assert "mlp: equal bits: 5 steps on 1 and on 2 replicas" in output


@SLOW
def test_a_run_compares_bits_before_it_trains() -> None:
    verdict = ReplicaVerdict(**compare_few_rows(small("--model=mlp", FOUR)))
    assert verdict == ReplicaVerdict(True, equal_bits=True, precision="in float64")
    correlated = ("--model=tests.planted_dependences:correlation", "--data=tests.own_data:arrays")
    of_shards = ReplicaVerdict(**compare_few_rows(small(*correlated, FOUR)))
    assert (of_shards.agrees, of_shards.equal_bits) == (False, False), (
        "a loss of a shard has equal bits, but is another"
    )
