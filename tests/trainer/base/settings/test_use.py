"""Tests that a setting which nothing in a run uses is refused before the first step, and says what
is used instead."""

from pathlib import Path
from typing import Any

from keras import Input, Model, Sequential, layers, optimizers
from numpy.random import default_rng

from tests.fixtures import parametrize
from tests.support import refused
from trainer.base.settings.fields import fields_of
from trainer.base.settings.request import Overrides
from trainer.base.settings.train_config import TrainConfig
from trainer.run import job

FIELDS = {
    name: field for name, field in fields_of(TrainConfig).items() if field.metadata["used_by"]
}
VALUES = {
    "learning_rate": "5",
    "learning_rate_schedule": "cosine",
    "warmup_steps": "1",
    "image_size": "64",
}
OWN = [
    f"--model={__name__}:own_optimizer",
    f"--data={__name__}:rows",
    "--global_batch_size=16",
    "--steps=1",
]


def rows(config: TrainConfig) -> Any:
    x = default_rng(0).normal(size=(32, 4)).astype("float32")
    return x, x.sum(axis=1)


def own_optimizer(config: TrainConfig, dataset: Any) -> Model:
    """Is how a script that calls fit compiles its model."""
    model = Sequential([Input((4,)), layers.Dense(1)])
    model.compile("adam", loss="mse")
    return model


def its_rate(config: TrainConfig, dataset: Any) -> Model:
    model = own_optimizer(config, dataset)
    model.compile(optimizers.SGD(config.learning_rate), loss="mse")
    return model


def train(folder: Path, *flags: str) -> int:
    words = [*OWN, f"--job_dir={folder / 'run'}", "--tensorboard=false", *flags]
    overrides = Overrides.parse(words)
    command = ["python", "-m", "trainer.task", *words]
    return job.run(overrides.config, command, 0.0, named=overrides.named)


@parametrize("name", FIELDS)
def test_each_is_refused_alone_by_a_model_that_does_not_use_it(name: str, tmp_path: Path) -> None:
    value = VALUES.get(name, "1")
    with refused(f" has no effect, as {FIELDS[name].metadata['used_by']}; or drop --{name}"):
        train(tmp_path, f"--{name}={value}")
    assert not (tmp_path / "run" / "stats.jsonl").exists()


def test_it_counts_as_used_by_whatever_reads_it_and_in_a_recipe_file_too(tmp_path: Path) -> None:
    reads_it = f"--model={__name__}:its_rate"
    assert train(tmp_path, reads_it, "--learning_rate=0.1") == 0
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("learning_rate: 0.1\n")
    with refused("learning_rate=0.1 has no effect"):
        train(tmp_path / "other", f"--recipe={recipe}")
    assert train(tmp_path / "other", f"--recipe={recipe}", reads_it) == 0
    assert train(tmp_path / "built_in", "--recipe=mlp_mnist") == 0  # its rate is not the user's
