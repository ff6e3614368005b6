"""Tests that a run ends before training if what it would save is another model than the one in
memory."""

from pathlib import Path
from typing import Any

import keras
import pytest
from keras import Input, Model, Sequential, layers, losses, saving

from tests.drill import read
from tests.fixtures import SLOW, Log, Make, parametrize
from tests.support import refused, run_job
from trainer.run.saved_model_check import DIFFERS

pytestmark = pytest.mark.exports

OWN = (
    f"--model={__name__}:model",
    "--data=tests.own_data:arrays",
    "--global_batch_size=16",
    "--steps=2",
)


@saving.register_keras_serializable("tests")
class Scaled(layers.Layer):
    """Multiplies by a number, which `keeps` says whether its get_config has."""

    def __init__(self, by: float = 1.0, keeps: bool = True, **options: Any) -> None:
        super().__init__(**options)
        self.by = by
        self.keeps = keeps

    def call(self, values: Any) -> Any:
        return values * self.by

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **({"by": self.by} if self.keeps else {})}


class Noisy(layers.Layer):
    """Draws in each call, also in predictions."""

    def call(self, values: Any) -> Any:
        return values + keras.random.normal((1,))


def model(config: Any, dataset: Any, *, kind: str = "plain") -> Model:
    middle = {"layer": Scaled(3.0, keeps=False), "kept": Scaled(3.0), "noisy": Noisy()}.get(
        kind, Scaled()
    )
    network = Sequential([Input((4,)), layers.Dense(3), middle, layers.Dense(1)])
    loss = losses.Huber(delta=0.1) if kind == "loss" else "mse"
    network.compile("sgd", loss, metrics=["mae"])
    return network


def test_what_saving_loses_ends_the_run_before_it_trains(small_config: Make) -> None:
    with refused(f"model={__name__}:model: {DIFFERS} in its predictions, first after scaled"):
        run_job(small_config(*OWN, "--kind=layer"))


def test_a_loss_that_is_saved_with_less_is_left_out_of_the_saved_model(
    small_config: Make, caplog: Log
) -> None:
    folder = run_job(small_config(*OWN, "--kind=loss"))
    assert "saves its Huber without what it was made with: compile it after loading" in caplog.text
    saved = read(folder / "result.json")["saved_model"]
    assert saved == "model.keras predicts as the model in memory"
    assert not saving.load_model(folder / "model" / "model.keras").compiled


@parametrize(
    "flags, outcome",
    [
        (
            ("--kind=kept", "--replicas=2"),
            "model.keras predicts and evaluates as the model in memory",
        ),
        (
            ("--kind=kept", "--precision=mixed_bfloat16"),
            "model.keras predicts and evaluates as the model in memory",
        ),
        (("--kind=noisy",), "not compared: two calls on the same rows differ"),
    ],
)
def test_the_end_of_a_run_says_what_its_model_is(
    flags: tuple[str, ...], outcome: str, small_config: Make
) -> None:
    folder = run_job(small_config(*OWN, *flags))
    assert read(folder / "result.json")["saved_model"].startswith(outcome)


@SLOW
@parametrize("flags", [(), ("--conditional",)])
def test_a_generator_is_compared_too(
    flags: tuple[str, ...], small_config: Make, tmp_path: Path
) -> None:
    folder = run_job(small_config("--model=wgan_gp", *flags, "--steps=1"))
    saved = read(folder / "result.json")["saved_model"]
    assert saved == "model.keras predicts as the model in memory"
