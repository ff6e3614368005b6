"""Tests that updates in several passes, of micro-batches, have the numbers of updates in one, and
need less memory."""

from pathlib import Path

import numpy as np
import pytest
from keras import Model, layers

from tests.fixtures import SLOW, Patch, parametrize
from tests.step_memory import peak
from tests.support import (
    classifier_of,
    largest_difference,
    refused,
    run_job,
    run_steps,
    saved_model,
    slow,
    small,
)
from trainer.base.run_files.job_files import read_run_info
from trainer.base.settings.train_config import TrainConfig
from trainer.data.dataset import Dataset
from trainer.invariance.layers import depends_on_replicas

OWN = ("--global_batch_size=16", "--learning_rate=0.01")
# 16 rows = 4 x 4 = 2 replicas x 2 x 4.
WAYS = (("--replicas=1", "--micro_batches=4"), ("--replicas=2", "--micro_batches=2"))


def own(model: str, data: str) -> tuple[str, ...]:
    return (f"--model=tests.own_data:{model}", f"--data=tests.own_data:{data}", *OWN)


ONE_REPLICA_TOO = ("--model=mlp", "--dropout=0.3", "--augment=flip,crop", "--class_weight=1:3")


@parametrize(
    "flags",
    [
        pytest.param(ONE_REPLICA_TOO, id="mlp"),
        slow(("--model=wgan_gp", "--diff_augment=color,translation,cutout"), id="wgan_gp"),
        slow(("--model=r3gan",), id="r3gan"),
        slow(("--model=dcgan",), id="dcgan"),
        slow(("--model=wgan_gp", "--conditional"), id="conditional"),
        slow(("--model=examples.conditional_gan:build",), id="own train_step"),
        slow(own("by_weight", "weighted"), id="by_weight"),
        *(
            slow(own(*names), id=names[0])
            for names in [
                ("masked_text", "next_tokens"),
                ("regularized", "weighted"),
                ("scalar_loss", "arrays"),
            ]
        ),
    ],
)
def test_in_float64_passes_agree_to_1e_10(flags: tuple[str, ...], monkeypatch: Patch) -> None:
    """Networks have no batch norm here, which normalises each micro-batch."""
    monkeypatch.setattr("trainer.models.gan._batch_norm", lambda x: x)
    ways = WAYS if flags == ONE_REPLICA_TOO else WAYS[1:]
    one, *others = (run_steps(small(*flags, "--precision=float64", *way), 3) for way in ((), *ways))
    for model, logs in others:
        agree = largest_difference(one[0], model) < 1e-10
        assert agree == (not depends_on_replicas(model, replicas=2, micro_batches=2))
        if agree:
            assert logs.means() == pytest.approx(one[1].means(), rel=1e-10)


def normalised(config: TrainConfig, dataset: Dataset) -> Model:
    return classifier_of(dataset.image_shape, layers.Flatten(), layers.BatchNormalization())


def test_batch_norm_normalises_each_pass_and_moves_its_averages_once() -> None:
    flags = (f"--model={__name__}:normalised", "--precision=float64")
    (one, logs), (several, logs_of_passes) = (
        run_steps(small(*flags, *way), 2) for way in ((), WAYS[0])
    )
    assert logs.means()["loss"] != pytest.approx(logs_of_passes.means()["loss"], rel=1e-6)
    means, variances = (
        [model.layers[1].get_weights()[i] for model in (one, several)] for i in (2, 3)
    )
    # Of inputs that no weight changes: the mean of the passes' means.
    assert np.allclose(means[0], means[1], rtol=1e-12)
    assert np.all(variances[1] <= variances[0] + 1e-12)
    assert np.any(variances[1] < 0.99 * variances[0])
    (line,) = depends_on_replicas(several, 1, 4)
    assert "batch_normalization" in line
    assert line.endswith("normalises the rows of one of micro_batches=4 alone")
    assert depends_on_replicas(several, 1) == []


def test_a_step_of_the_users_that_takes_all_rows_at_once_is_refused() -> None:
    with refused(
        "micro_batches=4: the train_step of _MeanLoss takes all rows at once: sum its gradients by"
    ):
        run_steps(small("--model=tests.models:mean_loss", *WAYS[0]), 1)


@SLOW
def test_a_resumed_run_may_change_how_steps_are_computed(tmp_path: Path) -> None:
    flags = (
        "--model=cnn",
        "--image_size=20",
        "--dropout=0.3",
        "--precision=float64",
        "--jit_compile=false",
    )
    straight, _ = run_steps(small(*flags), 4)
    for steps, micro_batches in ((2, 4), (4, 2)):
        own = (f"--job_dir={tmp_path}", f"--steps={steps}", f"--micro_batches={micro_batches}")
        job_dir = run_job(small(*flags, *own))
    resumed = saved_model(job_dir)
    assert largest_difference(straight, resumed) < 1e-10
    assert read_run_info(job_dir)[0]["batch"] == "global batch 16 = 1 replica x 2 micro-batches x 8"


@SLOW
def test_passes_need_less_memory() -> None:
    flags = (
        "--model=cnn",
        "--width=16",
        "--image_size=64",
        "--global_batch_size=64",
        "--dropout=0.2",
    )
    one, four = (peak(*flags, f"--micro_batches={passes}") for passes in (1, 4))
    assert four < 0.6 * one
