"""Tests golden files: verdicts on small runs of a user's own model, and what is refused."""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import keras
import numpy as np
import pytest

from tests.fixtures import Capture, Patch
from tests.support import classifier_of, run_steps, small
from trainer import golden
from trainer.base.errors import DONE, USER_MUST_CHANGE, UserError
from trainer.base.settings.train_config import TrainConfig
from trainer.checks.golden_file import (
    CHANGED,
    EQUAL,
    ROUNDING,
    Golden,
    causes,
    compare_with_golden,
    distances,
    losses_apart,
    moment,
    read_golden,
    write_golden,
)
from trainer.data.dataset import Dataset
from trainer.golden import line_of
from trainer.training.checkpoint import snapshot, variables_of

STEPS = [1, 2]
SIZES = [600, 3]


def tensors(change: float = 0.0) -> dict[str, Any]:
    """Returns two tensors, the first of which has one number changed."""
    draw = np.random.default_rng(0)
    large, small = draw.normal(size=SIZES[0]), draw.normal(size=SIZES[1])
    large[17] += change
    return {"kernel": large, "bias": small}


def content(change: float = 0.0, loss: float = 1.0, **other: Any) -> dict[str, Any]:
    """Returns what measuring leaves of a run."""
    moments = {str(step): moment(tensors(change), {"loss": loss}) for step in STEPS}
    about = {
        "data": {"rows": 8},
        "sources": {"mine.py": "1"},
        "packages": {"keras": "3.12", "absl-py": "2.1"},
        "instructions": "avx2",
    }
    return {"names": ["kernel", "bias"], "sizes": SIZES, "moments": moments, **about, **other}


def recorded() -> Golden:
    measured = content()
    digests = {step: value["digest"] for step, value in measured["moments"].items()}
    control = {str(step): {"tensors": [1e-12, 1e-13], "losses": 1e-13} for step in STEPS}
    return Golden(
        flags=["--recipe=x"], settings={"precision": "float64", "seed": 0}, steps=STEPS, learning_rate=1e-9,
        names=measured["names"], sizes=SIZES, moments=measured["moments"], control=control, data=measured["data"],
        sources=measured["sources"], packages=measured["packages"], digests={"avx2": digests},
    )  # fmt: skip


@pytest.mark.parametrize(("measured", "kind", "step", "tensor"), [
    (content(), EQUAL, 0, ""),
    (content(instructions="avx512f"), ROUNDING, 0, ""),  # no bits of this processor are recorded
    (content(change=1e-13), ROUNDING, 0, ""),
    (content(change=1e-4), CHANGED, 1, "kernel"),
    (content(loss=1.0 + 1e-12), EQUAL, 0, ""),  # other replicas add it in another order
    (content(loss=1.001), CHANGED, 1, "a loss or metric"),
    (content(sizes=[600, 4]), CHANGED, 1, ""),
    (content(sizes=[600, 3, 3]), CHANGED, 1, ""),
])  # fmt: skip
def test_verdicts(measured: dict[str, Any], kind: str, step: int, tensor: str) -> None:
    verdict = compare_with_golden(recorded(), measured)
    assert verdict.kind == kind
    if kind == CHANGED:
        assert verdict.step == step
        assert tensor in (verdict.tensor, "") or not verdict.reason
    assert bool(verdict.reason) == (measured["sizes"] != SIZES)


def test_a_change_of_a_small_tensor_is_not_hidden_by_large_ones() -> None:
    measured = content()
    for step in STEPS:
        measured["moments"][str(step)] = moment({**tensors(), "bias": tensors()["bias"] + 1e-8}, {"loss": 1.0})
    verdict = compare_with_golden(recorded(), measured)
    assert (verdict.kind, verdict.tensor) == (CHANGED, "bias")


def test_projections_estimate_the_norm_of_a_difference() -> None:
    draw, ratios = np.random.default_rng(1), []
    for place in range(200):
        a, b = draw.normal(size=(2, 50))
        names = {str(other): np.zeros(1) for other in range(place)}  # the signs depend on the place
        pair = (moment({**names, "a": values}, {}) for values in (a, b))
        ratios.append(distances(*pair)[-1] / np.linalg.norm(a - b))
    assert 0.85 < np.sqrt(np.mean(np.square(ratios))) < 1.15
    assert max(ratios) < 4
    backwards = (moment({"a": np.arange(50.0)[::way]}, {}) for way in (1, -1))  # the same sum
    assert distances(*backwards)[0] > 0


@pytest.mark.parametrize(("losses", "others", "apart"), [
    ({"loss": 1.0}, {"loss": 1.0}, 0.0), ({"loss": 2.0, "acc": 0.5}, {"loss": 1.0, "acc": 0.5}, 1.0),
    ({"loss": 1.0, "auc": 0.5}, {"loss": 1.0, "mse": 2.0}, 0.0), ({"loss": np.nan}, {"loss": 1.0}, np.inf),
    ({"loss": None}, {"loss": None}, 0.0), ({"loss": 2e-6}, {"loss": 1e-6}, 1.0),
])  # fmt: skip
def test_losses_are_compared_with_the_largest(losses: Any, others: Any, apart: float) -> None:
    assert losses_apart(losses, others) == apart


def test_what_differs_is_named() -> None:
    """Of packages TensorFlow, Keras and NumPy first; those that were installed since then are left out."""
    golden = recorded()
    assert [*causes(golden, golden.settings, content())] == [
        "settings equal", "data equal", "sources equal", "packages equal", "instruction sets equal",
    ]  # fmt: skip
    there = content(
        data={"rows": 9}, sources={"mine.py": "2", "new.py": "3"}, packages={"keras": "3.15", "new": "1"},
        instructions="avx512f",
    )  # fmt: skip
    assert [*causes(golden, {"precision": "float64", "seed": 1}, there)] == [
        "settings differ: seed", "data differ: rows", "sources differ: mine.py, new.py",
        "packages differ: keras 3.12 -> 3.15, absl-py 2.1 -> none", "instruction sets differ: avx2 -> avx512f",
    ]  # fmt: skip
    more = content()
    for step in STEPS:
        more["moments"][str(step)]["losses"]["auc"] = 0.5
    named = "losses or metrics of one alone differ: auc"
    assert next(causes(golden, golden.settings, more)) == named
    assert line_of({"replicas=1": compare_with_golden(golden, more)}, [named]) == f"equal bits on replicas=1; {named}"
    settings = {**golden.settings, **dict.fromkeys("abcdefg", 1)}
    assert next(causes(golden, settings, content())) == "settings differ: a, b, c, d, e and 2 more"


class Masked(keras.layers.Layer):
    """Sets rows to 0 at random; what it gives has a first axis of unknown size."""

    def build(self, shape: Any) -> None:
        self.draws = keras.random.SeedGenerator(5)

    def call(self, x: Any, training: bool = False) -> Any:
        drawn = keras.random.uniform((keras.ops.shape(x)[0], 1), seed=self.draws)
        return keras.ops.where(drawn < 0.5, keras.ops.zeros_like(x), x) if training else x


def masked(config: TrainConfig, dataset: Dataset) -> keras.Model:
    layers = [keras.layers.Flatten(), Masked(), keras.layers.Dense(8), keras.layers.Dropout(0.5, seed=1)]
    return classifier_of(dataset.image_shape, *layers)


def test_rows_in_another_order_change_no_more_than_rounding() -> None:
    """Layers draw the same for a row, wherever it stands: else the control would hide what has changed."""
    config = small(f"--model={__name__}:masked", "--precision=float64")
    weights = []
    for order in (None, 7):
        model, _ = run_steps(config, 2, order)
        weights.append(snapshot(variables_of(model)))
    for name, values in weights[0].items():
        np.testing.assert_allclose(weights[1][name], values, rtol=1e-10, atol=1e-12, err_msg=name)


def test_a_file_is_read_as_it_was_written_and_reads_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "golden" / "x.json"  # in a folder that is made
    write_golden(path, recorded())
    assert read_golden(path) == recorded()
    assert len(path.read_text().splitlines()) > 15


@pytest.mark.parametrize(("damage", "message"), [
    (lambda path: path.unlink(), "is missing"),
    (lambda path: path.write_text("{"), "cannot be read"),
    (lambda path: path.write_text("[]"), "contains no JSON object"),
    (lambda path: path.write_text('{"format": 9}'), "is no golden file of this version"),
    (lambda path: path.write_text('{"format": 1, "steps": [1]}'), "is damaged"),
    (lambda path: _without(path, "moments"), "is damaged"), (lambda path: _without(path, "control"), "is damaged"),
])  # fmt: skip
def test_a_damaged_file_is_told_in_one_line(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    path = tmp_path / "x.json"
    write_golden(path, recorded())
    damage(path)
    with pytest.raises(UserError, match=message) as caught:
        read_golden(path)
    assert "record it again (python -m trainer.golden record …)" in str(caught.value)


def _without(path: Path, name: str) -> None:
    text = json.loads(path.read_text())
    text[name].pop("2")
    path.write_text(json.dumps(text))


@pytest.mark.parametrize(("words", "line"), [
    (["recrod"], "error: 'recrod' is no verb of trainer.golden: use record or check"),
    (["record", "--recipe=wgan_gp_digits"], "error: --out is missing: python -m trainer.golden record --recipe=NAME"),
    (["record", "--recipe=nowhere", "--out=x.json"], "error: recipe=nowhere"),
    (["check", "x.json", "--replicas=0"], "error: '0' is not a whole number from 1 on: write 1,2"),
    (["check", "missing.json"], "error: missing.json is missing: record it again"),
])  # fmt: skip
def test_a_mistake_is_one_line(words: list[str], line: str, capsys: Capture, tmp_path: Path) -> None:
    assert golden.main(words) == USER_MUST_CHANGE
    told = capsys.readouterr()
    assert (told.out + told.err).startswith(line)
    assert len((told.out + told.err).splitlines()) == 1


MODEL = """\
import keras
import numpy as np

def data(config):
    x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
    return x, x.sum(axis=1)

def model(config, dataset, *, units: int = 4):
    network = keras.Sequential([keras.layers.Dense(units, "relu"), keras.layers.Dense(1)])
    network.compile(keras.optimizers.Adam(config.learning_rate), loss="mse")
    return network
"""
FLAGS = ["--model=mine:model", "--data=mine:data", "--steps=4"]


@pytest.mark.slow
def test_a_users_model_is_recorded_checked_and_found_changed(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[3]}")  # of the processes that measure

    def command(*words: str) -> tuple[int, str, str]:
        """Returns the exit code, and what is printed to stdout and to stderr."""
        sys.modules.pop("mine", None)
        importlib.invalidate_caches()
        return golden.main(words), *capsys.readouterr()

    (tmp_path / "mine.py").write_text(MODEL)
    assert command("record", *FLAGS, "--out=golden/mine.json")[0] == DONE
    assert (tmp_path / "golden" / "mine.json").stat().st_size < 12_000
    code, out, err = command("check", "golden/mine.json", "--replicas=1,2", "--workers=2")
    assert code == DONE, err
    assert out.startswith("mine   equal bits on replicas=1")
    file = tmp_path / "golden" / "mine.json"
    here = next(iter(read_golden(file).digests))
    file.write_text(file.read_text().replace(f'"{here}"', '"of-another"'))
    _, out, _ = command("record", *FLAGS, "--out=golden/mine.json")
    assert f"holds these numbers already: the bits of {here} are added" in out
    assert read_golden(file).digests.keys() == {"of-another", here}
    # Names do not count, and the bits are those of another processor.
    (tmp_path / "mine.py").write_text(MODEL.replace("network", "net").replace('"relu")', '"relu", name="first")'))
    file.write_text(file.read_text().replace(f'"{here}"', '"of-a-third"'))
    code, out, _ = command("check", "golden/mine.json")
    assert code == DONE
    assert out.startswith("mine   rounding on replicas=1; 0.0 of 3 times")
    assert out.endswith(f"instruction sets differ: of-another and of-a-third -> {here}\n")
    (tmp_path / "mine.py").write_text(
        MODEL.replace("Adam(config.learning_rate)", "Adam(config.learning_rate, epsilon=2e-7)")
    )
    code, _, err = command("check", "golden/mine.json", "--junit=out.xml")
    assert code == USER_MUST_CHANGE
    assert "CHANGED on replicas=1 from step 1, first in" in err
    assert "settings equal, data equal, sources differ: mine.py, packages equal, instruction sets" in err
    suite = ElementTree.parse(tmp_path / "out.xml").getroot()
    assert (suite.get("failures"), suite[0][0].get("message", "")[:7]) == ("1", "CHANGED")
    (tmp_path / "mine.py").unlink()
    code, _, err = command("check", "golden/mine.json")
    assert (code, len(err.splitlines())) == (USER_MUST_CHANGE, 1)
    assert "golden/mine.json: " in err
