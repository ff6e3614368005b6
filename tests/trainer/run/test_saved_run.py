"""Tests that trainer.evaluate and trainer.predict give Keras's numbers on any replicas, or one
line."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import Input, Model, Sequential, layers, ops
from numpy.random import default_rng
from numpy.testing import assert_allclose

from tests.drill import read
from tests.fixtures import SLOW, Capture, Folders, parametrize
from tests.support import read_lines, resolved, run_job, saved_model, slow, tiny
from tests.trainer.data.test_user_data import settings
from trainer import evaluate, predict
from trainer.base.run_files.job_files import TOO_OLD
from trainer.base.settings.request import Overrides
from trainer.cluster.strategy import make_replicas
from trainer.measures.prediction import named_outputs
from trainer.measures.prediction import predict as predictions
from trainer.run.training_setup import build_setup
from trainer.training.checkpoint import read_checkpoint

Runs = Callable[..., Path]
CASES: list[Any] = [
    ("regression", "weighted_pair"),
    slow("two_outputs", "named_pair"),
    slow("segmenter", "masks"),
]
SMALL = ("--tensorboard=false", "--checkpoint_every_steps=4", "--steps_per_loop=4")
MORE = "--data=tests.own_data:more"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: Folders) -> Runs:
    """Returns the job directory of a finished run, trained once."""
    kept: dict[Any, Path] = {}

    def of(*given: str) -> Path:
        """Takes the model, the data, and flags."""
        keras.config.set_floatx("float64")  # what Keras then predicts in the test, too
        if given not in kept:
            model, data, *flags = given
            kept[given] = run_job(
                settings(data, model, f"--job_dir={tmp_path_factory.mktemp(model)}", *SMALL, *flags)
            )
        return kept[given]

    return of


@pytest.fixture
def copied(runs: Runs, tmp_path: Path) -> Path:
    """Returns a copy of a job directory, to damage."""
    return Path(shutil.copytree(runs("regression", "weighted_pair"), tmp_path / "run"))


def by_keras(run: Path, checkpoint: str = "") -> tuple[dict[str, float], dict[str, Any]]:
    """Returns what Keras's evaluate and predict, the outputs by name, give on one device, in
    batches of 6."""
    stored: dict[str, Any] = read(run / "run.json")["config"]
    overrides = Overrides.read(
        {name: value for name, value in stored.items() if value not in (None, "")}
    )
    config = replace(overrides, values={}, recipe=overrides.values).config
    setup = build_setup(config, make_replicas(config))
    model = setup.model
    saved = saved_model(run)
    if checkpoint:
        _, values = read_checkpoint(run / "checkpoints" / checkpoint)
        of_model = [values[name] for name in sorted(values) if name.startswith("model/")]
        saved.set_weights(of_model[: len(model.weights)])
    model.set_weights(saved.get_weights())
    held = setup.dataset.evaluation
    parts = held.gather(tf.range(held.count))
    x, *others = tf.nest.map_structure(lambda part: part.numpy(), parts)
    if setup.dataset.holds_images:
        x = x.astype(keras.config.floatx())
    outputs = saved.predict(x, batch_size=6, verbose=0)
    return (
        model.evaluate(
            x,
            *others[:1],
            batch_size=6,
            sample_weight=others[1] if others[1:] else None,
            return_dict=True,
            verbose=0,
        ),
        outputs if isinstance(outputs, dict) else {"predictions": outputs},
    )


def evaluated(run: Path, out: Path, *flags: str) -> dict[str, float]:
    arguments = [str(run), "--evaluation_batch_size=6", f"--out={out / 'values.json'}", *flags]
    assert evaluate.main(arguments) == 0
    values: dict[str, float] = read(out / "values.json")["values"]
    return values


def predicted(run: Path, out: Path, *flags: str) -> dict[str, Any]:
    arguments = [str(run), "--evaluation_batch_size=6", f"--out={out / 'x.npz'}", *flags]
    assert predict.main(arguments) == 0
    with np.load(out / "x.npz") as found:
        return dict(found)


def check_as_keras(run: Path, out: Path, *flags: str, checkpoint: str = "") -> None:
    values, outputs = by_keras(run, checkpoint)
    assert evaluated(run, out, *flags) == pytest.approx(values, rel=1e-10)
    found = predicted(run, out, *flags)
    assert {name: array.dtype for name, array in found.items()} == {
        name: of.dtype for name, of in outputs.items()
    }
    for name, array in outputs.items():
        assert_allclose(found[name], array, rtol=1e-12)


@parametrize("model, data", CASES)
def test_both_are_kerass_own_with_a_remainder_on_two_replicas(
    model: str, data: str, runs: Runs, tmp_path: Path
) -> None:
    """The evaluation part has 21 rows (of images, 20), so the batch of 6 leaves a smaller one."""
    check_as_keras(runs(model, data), tmp_path, "--replicas=2")


@parametrize(
    "wanted, name, replicas", [("4", "step-00000004", 2), slow("newest", "step-00000008", 1)]
)
def test_a_checkpoint_is_taken_on_request(
    wanted: str, name: str, replicas: int, runs: Runs, tmp_path: Path
) -> None:
    run = runs("regression", "weighted_pair")
    check_as_keras(
        run, tmp_path, f"--checkpoint={wanted}", f"--replicas={replicas}", checkpoint=name
    )


def test_the_best_checkpoint_is_that_of_the_best_metric(runs: Runs, tmp_path: Path) -> None:
    run = runs(
        "regression", "pair", "--steps=9", "--learning_rate=0.5", "--checkpoint_every_steps=3"
    )
    lines = read_lines(run / "stats.jsonl")
    losses = {
        one["step"]: one["losses"]["val_loss"] for one in lines if one["kind"] == "evaluation"
    }
    best = min(losses, key=losses.__getitem__)
    found = evaluated(run, tmp_path, "--checkpoint=best", "--evaluation_batch_size=16")
    assert found["loss"] == pytest.approx(losses[best], rel=1e-10)


@SLOW
@parametrize("replicas", ["--replicas=1", "--replicas=2"])
def test_other_data_are_all_of_their_rows(replicas: str, runs: Runs, tmp_path: Path) -> None:
    """13 rows are fewer than a global batch; the data function has settings of its own; weights may
    be added."""
    run = runs("regression", "pair")
    draw = default_rng(7)
    x = draw.normal(size=(13, 4))
    saved = saved_model(run)
    outputs = saved.predict(x, batch_size=6, verbose=0)
    for flags in (["--parts=1"], ["--parts=2"], ["--parts=1", "--checkpoint=newest"]):
        found = predicted(run, tmp_path, MORE, "--rows=13", *flags, replicas)["predictions"]
        assert_allclose(found, outputs, rtol=1e-12)
    targets = x @ [1.0, -2.0, 0.5, 0.0] + 1.0
    errors = np.abs(outputs[:, 0] - targets)
    for parts, weight in ((2, 1.0), (3, draw.uniform(0.5, 2.0, 13))):
        values = evaluated(run, tmp_path, MORE, "--rows=13", f"--parts={parts}", replicas)
        expected = [np.mean(errors**2 * weight), np.mean(errors)]
        assert [values["loss"], values["mae"]] == pytest.approx(expected, rel=1e-10)


def test_a_dataset_without_row_numbers_is_read_to_its_end(runs: Runs, tmp_path: Path) -> None:
    """It shuffles anew at each reading, so its rows must come from one reading, and no row
    twice."""
    run = runs("regression", "pair")
    flags = [("--data=tests.own_data:tf_examples", f"--replicas={count}") for count in (1, 2)]
    whole, two = (predicted(run, tmp_path, *of)["predictions"] for of in flags)
    other = predicted(run, tmp_path, "--data=tests.own_data:other_batches")["predictions"]
    assert whole.shape == other.shape == (50, 1)
    assert_allclose(np.sort(two, axis=0), np.sort(whole, axis=0), rtol=1e-12)
    alone, shared = (evaluated(run, tmp_path, *of) for of in flags)
    assert shared == pytest.approx(alone, rel=1e-10)


def test_built_in_models_and_sources(tmp_path: Path, capsys: Capture) -> None:
    flags = [
        "--model=mlp",
        "--data=digits",
        "--image_size=8",
        "--width=8",
        "--steps=2",
        "--evaluation_fraction=0.1",
    ]
    job_dir = run_job(resolved(*flags, *SMALL, f"--job_dir={tmp_path / 'run'}"))
    images = predicted(job_dir, tmp_path)["predictions"]
    assert images.shape == (180, 10)
    lines = read_lines(job_dir / "stats.jsonl")
    values = [one["losses"] for one in lines if one["kind"] == "evaluation"][-1]
    found = evaluated(job_dir, tmp_path, "--evaluation_batch_size=64")
    assert found["loss"] == pytest.approx(values["val_loss"], rel=1e-6)
    evaluated(job_dir, tmp_path, "--data=digits", "--replicas=2")
    assert read(tmp_path / "values.json")["examples"] == 1797
    text = (job_dir / "run.json").read_text()
    (job_dir / "run.json").write_text(text.replace('"3"', '"drei"'))
    assert evaluate.main([str(job_dir), "--data=digits"]) == 2
    assert (
        "data=digits: its classes are 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, but those of"
        in capsys.readouterr().err
    )


@SLOW
def test_a_generator_predicts_from_noise(tmp_path: Path) -> None:
    own = ("--model=wgan_gp", "--latent_dim=4", "--steps=1", f"--job_dir={tmp_path / 'run'}")
    job_dir = run_job(tiny(*own, *SMALL))
    images = predicted(job_dir, tmp_path, MORE, "--parts=1")["predictions"]
    assert images.shape == (11, 16, 16, 1)
    drawn = predicted(job_dir, tmp_path, MORE, "--parts=1", "--checkpoint=newest")["predictions"]
    assert_allclose(drawn, images, rtol=1e-5, atol=1e-6)


def test_outputs_of_nests_have_names(tmp_path: Path) -> None:
    class Nested(Model):
        def call(self, x: Any) -> Any:
            return {"box": {"left": x, "right": [2 * x, 3 * x]}, "file": x[:, 0]}

    class Scalar(Nested):
        def call(self, x: Any) -> Any:
            return ops.sum(x)

    config = settings("pair", "regression", "--evaluation_batch_size=6")
    setup = build_setup(config, make_replicas(config))
    held = setup.dataset.evaluation
    assert held is not None

    def found(model: Model) -> dict[str, Any]:
        return dict(
            named_outputs(predictions(model, setup.replicas, held, 6, setup.dataset.step_data), [])
        )

    x = np.asarray(held.gather(tf.range(held.count))[0])
    named = found(Nested())
    assert {name: array.shape for name, array in named.items()} == {
        "box.left": (21, 4),
        "box.right.0": (21, 4),
        "box.right.1": (21, 4),
        "file": (21,),
    }
    assert_allclose(named["box.right.1"], 3 * x)
    with pytest.raises(Exception, match="one row each is needed"):
        found(Scalar())


@parametrize(
    "command, flags, line",
    [
        ("evaluate", [f"{MORE}", "--columns=3"], "an example is float64 (3,), but "),
        ("predict", [f"{MORE}", "--columns=3"], "which does not fit the model of "),
        (
            "predict",
            ["--data=tests.own_data:words"],
            "an example is string (4,), which does not fit the model of ",
        ),
        (
            "evaluate",
            [f"{MORE}", "--parts=1"],
            "it has no targets to evaluate: use trainer.predict for such rows",
        ),
        (
            "evaluate",
            [MORE, "--row=3"],
            "unknown flag --row; did you mean 'rows'? --help=all lists them all",
        ),
        ("predict", [MORE, "--parts=4"], "parts=4 must be one of 1, 2, 3."),
        ("predict", ["--data=tests.own_data:none"], "tests.own_data has no function none"),
        (
            "predict",
            ["--data=tests.own_data:tf_endless"],
            "the length of the tf.data.Dataset is unknown or infinite",
        ),
        (
            "evaluate",
            ["--checkpoint=last"],
            "checkpoint=last: use the number of a step, newest or best",
        ),
        (
            "evaluate",
            ["--checkpoint=7"],
            "has no checkpoint step-00000007: it keeps step-00000004, ",
        ),
        (
            "predict",
            ["--out=x.csv"],
            "out=x.csv: the arrays are written as .npz: use a name that ends in .npz",
        ),
        ("evaluate", ["--out=x.txt"], "out=x.txt: the values are written as JSON"),
    ],
)
def test_a_mistake_is_one_line(
    command: str, flags: list[str], line: str, copied: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = f"--out={tmp_path / 'x'}.{'npz' if command == 'predict' else 'json'}"
    assert {"evaluate": evaluate, "predict": predict}[command].main([str(copied), out, *flags]) == 2
    *_, shown = capsys.readouterr().err.splitlines()
    assert line in shown
    assert not [*tmp_path.glob("x.*")]


def change(run: Path, **settings: Any) -> None:
    info = read(run / "run.json")
    info["config"] |= settings
    (run / "run.json").write_text(json.dumps(info))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def other_weights(run: Path) -> None:
    Sequential([Input((4,)), layers.Dense(3)]).save(run / "model" / "model.keras")


def of_0_2(run: Path) -> None:
    info = read(run / "run.json")
    info["versions"]["trainer"] = "0.2.0"
    (run / "run.json").write_text(json.dumps(info))


NEWEST = "checkpoints/step-00000008"


@parametrize(
    "damage, flags, line",
    [
        (lambda run: (run / "run.json").unlink(), [], "is not the job directory of a run: "),
        (of_0_2, [], f": {TOO_OLD}"),
        (lambda run: change(run, seed="x"), [], "run.json: seed='x' must be a whole number"),
        (
            lambda run: change(run, sed=1),
            [],
            "run.json: unknown setting 'sed'; did you mean 'seed'?",
        ),
        (
            lambda run: change(run, model="tests.own_data:gone"),
            ["--checkpoint=8"],
            "tests.own_data has no function gone",
        ),
        (
            lambda run: change(run, data="tests.own_data:arrays"),
            [],
            "have no evaluation part: use --data",
        ),
        (
            lambda run: shutil.rmtree(run / "model"),
            [],
            "has no model/model.keras yet: wait until the run is done, or ",
        ),
        (lambda run: cut(run / "model" / "model.keras"), [], "model.keras: Keras cannot load it: "),
        (other_weights, [], "model.keras: its weights do not fit this model"),
        (
            lambda run: shutil.rmtree(run / "checkpoints"),
            ["--checkpoint=newest"],
            "has no checkpoint: leave out",
        ),
        (
            lambda run: cut(run / NEWEST / "manifest.json"),
            ["--checkpoint=8"],
            f"{NEWEST}: damaged (",
        ),
        (
            lambda run: cut(next((run / NEWEST).glob("*.data*"))),
            ["--checkpoint=newest"],
            "has another size",
        ),
        (
            lambda run: cut(run / NEWEST / "manifest.json"),
            ["--checkpoint=best"],
            "its newest checkpoint is damaged (",
        ),
    ],
)
def test_a_damaged_run_is_one_line(
    damage: Callable[[Path], Any], flags: list[str], line: str, copied: Path, capsys: Capture
) -> None:
    damage(copied)
    assert evaluate.main([str(copied), *flags]) == 2
    *_, shown = capsys.readouterr().err.splitlines()
    assert line in shown
    assert str(copied) in shown or "own_data" in shown


def test_what_a_run_needed_to_train_is_not_needed_to_use_it(copied: Path, tmp_path: Path) -> None:
    values = evaluated(copied, tmp_path)
    change(copied, recipe="gone.yaml", callbacks="gone:stop", patience_of_mine=3)
    assert evaluated(copied, tmp_path) == values
    assert predicted(copied, tmp_path, "--checkpoint=newest", MORE)["predictions"].shape == (11, 1)
    stack = [Input((4,)), layers.Dense(8, activation="relu"), layers.Dense(1)]
    # of code that has changed since
    Sequential(stack).save(copied / "model" / "model.keras")
    assert predicted(copied, tmp_path)["predictions"].shape == (21, 1)


@parametrize("palette", ["red green blue black", slow("blue")])
def test_other_data_of_a_shared_setting_keep_the_vocabulary_of_the_run(
    palette: str, runs: Runs, tmp_path: Path
) -> None:
    run = runs("colour_model", "colours")
    found = evaluated(run, tmp_path, f"--palette={palette}")
    outputs = predicted(run, tmp_path, f"--palette={palette}")["predictions"][:, 0]
    targets = [float(len(each)) for each in palette.split() * 16]
    assert found["loss"] == pytest.approx(np.mean((outputs - targets) ** 2), rel=1e-10)
