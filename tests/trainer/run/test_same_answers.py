"""A trained model answers alike in the run, in trainer.evaluate, in trainer.predict and served,
whatever its inputs."""

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import Input, Model, Sequential, layers, losses, optimizers, saving
from numpy.random import default_rng
from numpy.testing import assert_allclose

from tests.drill import read
from tests.fixtures import parametrize
from tests.support import read_lines, resolved, run_job, slow
from trainer import evaluate, predict
from trainer.base.errors import DONE, USER_MUST_CHANGE
from trainer.run.export import export
from trainer.run.served_model import ServedModel

pytestmark = pytest.mark.exports


@saving.register_keras_serializable("tests")
class Both(Model):
    """Takes a dict, or a pair."""

    def __init__(self, *, by_name: bool, **others: Any) -> None:
        super().__init__(**others)
        self.by_name = by_name
        self.embedding = layers.Embedding(5, 3)
        self.first = layers.Dense(4, "tanh")
        self.last = layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        number, kind = (inputs["num"], inputs["kind"]) if self.by_name else inputs
        return self.last(self.first(layers.concatenate([number, self.embedding(kind)])))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "by_name": self.by_name}


@saving.register_keras_serializable("tests")
class Doubled(Model):
    """Answers with twice what it is trained on, by a predict_step of its own."""

    def predict_step(self, data: Any) -> Any:
        return {"doubled": 2.0 * super().predict_step(data)}


@saving.register_keras_serializable("tests")
class DoubledChain(Sequential):
    """The same of a chain, of which a clone loses the class."""

    def predict_step(self, data: Any) -> Any:
        return {"doubled": 2.0 * super().predict_step(data)}


def _functional(structure: Any, number: Any, kind: Any, of: Any = Model) -> Model:
    both = layers.concatenate([number, layers.Embedding(5, 3)(kind)])
    return of(structure, layers.Dense(1)(layers.Dense(4, "tanh")(both)))


def build(config: Any, dataset: Any, *, kind: str = "") -> Model:
    number = Input((3,), name="num")
    token = Input((), dtype="int32", name="kind")
    model: Model
    if kind in ("by_name", "by_place"):
        model = Both(by_name=kind == "by_name")
    elif kind == "chain":
        model = DoubledChain([Input((3,)), layers.Dense(1)])
    elif kind == "list":
        model = _functional([number, token], number, token)
    else:
        of = Doubled if kind == "doubled" else Model
        model = _functional({"num": number, "kind": token}, number, token, of)
    model.compile(optimizers.SGD(0.1), losses.Huber(delta=0.1), metrics=["mae"])
    return model


def rows(config: Any, *, kind: str = "") -> Any:
    draw = default_rng(0)
    number = draw.normal(size=(48, 3))
    token = draw.integers(0, 5, 48).astype("int32")
    x: Any = {"num": number, "kind": token}
    if kind == "by_place":
        x = number, token
    elif kind == "chain":
        x = number
    y = number[:, :1] + token[:, None]

    def part(first: int, last: int) -> Any:
        return keras.tree.map_structure(lambda leaf: leaf[first:last], (x, y))

    return part(0, 32), part(32, 48)


def instances(kind: str) -> list[Any]:
    """Returns the rows for evaluation as JSON, under the names of the data function."""
    x = rows(None, kind=kind)[1][0]
    if kind == "chain":
        return list(x.tolist())
    named = x if isinstance(x, dict) else {"inputs_0": x[0], "inputs_1": x[1]}
    return [
        dict(zip(named, row, strict=True))
        for row in zip(*(leaf.tolist() for leaf in named.values()), strict=True)
    ]


KINDS = ("dict", "by_place", "chain", *map(slow, ("list", "by_name", "doubled")))


@parametrize("kind", KINDS)
def test_all_answer_as_the_run(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "run"
    words = [f"--model={__name__}:build", f"--data={__name__}:rows", f"--kind={kind}", "--steps=8"]
    run_job(resolved(*words, "--global_batch_size=8", f"--job_dir={folder}", "--tensorboard=false"))
    result = read(folder / "result.json")
    assert "predicts as the model in memory" in result["saved_model"]

    assert evaluate.main([str(folder), f"--out={tmp_path}/values.json"]) == DONE
    values = read(tmp_path / "values.json")["values"]
    assert values == pytest.approx(
        {name: result["history"][f"val_{name}"][-1] for name in values}, rel=1e-5
    )

    assert predict.main([str(folder), f"--out={tmp_path}/outputs.npz"]) == DONE
    (predicted,) = np.load(tmp_path / "outputs.npz").values()
    y = rows(None, kind=kind)[1][1]
    share = 2.0 if kind in ("doubled", "chain") else 1.0
    assert np.abs(predicted / share - y).mean() == pytest.approx(values["mae"], rel=1e-5)

    lines = tmp_path / "rows.jsonl"
    lines.write_text("".join(f"{json.dumps(row)}\n" for row in instances(kind)))
    assert predict.main([str(folder), f"--rows_file={lines}", f"--out={tmp_path}/answers"]) == DONE
    answers = read_lines(tmp_path / "answers/predictions-00000.jsonl")
    assert_allclose([answer["prediction"] for answer in answers], predicted, rtol=1e-5, atol=1e-6)


def test_rows_of_which_none_is_answered_are_told_by_the_exit_code(tmp_path: Path) -> None:
    x = Input((3,))
    export(Model(x, layers.Dense(1)(x)), tmp_path / "model", None)
    for number, text in enumerate(("", "[1]\n", "{\n")):
        (tmp_path / "rows.jsonl").write_text(text)
        words = [
            f"{tmp_path}/model",
            f"--rows_file={tmp_path}/rows.jsonl",
            f"--out={tmp_path}/out{number}",
        ]
        assert predict.main(words) == USER_MUST_CHANGE
    assert ServedModel(tmp_path / "model", "run").parse([[1.0, 2.0, 3.0]])[1] == {}
