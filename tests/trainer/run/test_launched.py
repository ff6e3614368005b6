"""Scripts that call `fit`, as they are: by plain python and by `trainer.launch`, on one and on two
replicas."""

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from deploy.platform.local import free_addresses
from tests import rows_mixed, workers
from trainer.base.errors import UserError
from trainer.base.settings.train_config import TrainConfig
from trainer.invariance.internals import seed_initializers
from trainer.measures.keras_calls import answered_by_replicas
from trainer.run.launched import opened_run
from trainer.run.proof import PROVED
from trainer.run.replica_check import SKIP

SCRIPTS = Path(__file__).parents[2] / "scripts"
LAUNCH = ["-m", "trainer.launch", "--job_dir=run"]
# Plain Keras trains these scripts by the same numbers.
QUICK = ("digits",)
SLOW = (
    "anomalies",
    "loop",
    "own_step",
    "pictures",
    "prices",
    "reviews",
    "stopped_early",
    "streams",
    "two_fits",
)
# What it draws depends on the scripts that ran before it in the process.
UNSEEDED = ("unseeded",)


def run(folder: Path, *words: str, code: int = 0) -> tuple[dict[str, Any], str]:
    """Runs python in a new folder, or once more in one; returns what the script wrote, and what was
    printed."""
    folder.mkdir(exist_ok=True)
    inherited = {name: value for name, value in os.environ.items() if name != SKIP}
    environment = {**inherited, "PYTHONPATH": str(SCRIPTS.parents[1])}
    ended = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    printed = ended.stdout + ended.stderr
    assert ended.returncode == code, printed
    return written_in(folder) if (folder / "found.json").exists() else {}, printed


def written_in(folder: Path) -> Any:
    """Returns what a script wrote into its folder."""
    return json.loads((folder / "found.json").read_text())


def numbers(value: Any) -> Iterator[float]:
    """Yields the numbers in lists and dictionaries, and how many parts each has."""
    if isinstance(value, (dict, list)):
        yield len(value)
        for key in sorted(value) if isinstance(value, dict) else range(len(value)):
            yield from numbers(value[key])
    else:
        yield value


def same(one: Any, other: Any) -> None:
    assert [*numbers(other)] == pytest.approx([*numbers(one)], rel=1e-10, abs=1e-12)


@pytest.fixture(scope="module")
def on_one_device(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Returns a function that runs scripts in one process, once, and returns their folder: on 0
    replicas, that is by plain Keras, or on 1."""

    @functools.cache
    def ran(replicas: str, *names: str) -> Path:
        folder = tmp_path_factory.mktemp("scripts")
        _, printed = run(folder, "-m", "tests.scripts", replicas, *names)
        assert replicas == "0" or "retracing" not in printed
        return folder

    return ran


@pytest.mark.parametrize(
    "names", [QUICK, *(pytest.param(names, marks=pytest.mark.slow) for names in (SLOW, UNSEEDED))]
)
def test_scripts_are_unchanged_and_have_the_numbers_of_keras(
    names: tuple[str, ...], on_one_device: Callable[..., Path], tmp_path: Path
) -> None:
    for code in (75, 0):
        _, printed = run(tmp_path, "-m", "tests.scripts", "2", *names, code=code)
        assert "retracing" not in printed
        assert printed.count("state saved at step") == (len(names) if code else 0)
    assert printed.count("resumes at step") >= len(names)
    for name in names:
        both = written_in(tmp_path / name)
        alone = written_in(on_one_device("1", *names) / name)
        if names != UNSEEDED:
            same(written_in(on_one_device("0", *names) / name), alone)
        # What a callback appends to a variable of the script ends with its process.
        if "seen" in alone:
            alone["seen"] = alone["seen"][-len(both["seen"]) :]
        same(alone, both)
        job = tmp_path / name / "run"
        assert json.loads((job / "result.json").read_text())["state"] == "done"
        about = json.loads((job / "run.json").read_text())
        assert about["replica_check"]["proof"] == PROVED
        assert [*(job / "model").iterdir()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "name"), [(names, name) for names in (QUICK, SLOW, UNSEEDED) for name in names]
)
def test_two_machines_have_the_numbers_of_one_device_and_each_runs_the_script(
    names: tuple[str, ...], name: str, on_one_device: Callable[..., Path], tmp_path: Path
) -> None:
    chief, worker = free_addresses(2)
    addresses = [chief, worker.replace("127.0.0.1", "127.0.0.2")]  # as if on two machines
    words = [f"--job_dir={tmp_path / 'run'}", str(SCRIPTS / f"{name}.py"), "found.json"]
    codes = [0]
    if name == "stopped_early":
        words.append("sent")
        codes = [75, 0]
    folders = [tmp_path / "0", tmp_path / "1"]
    for code in codes:
        started = []
        for index, folder in enumerate(folders):
            folder.mkdir(exist_ok=True)
            log = folder / "log"
            started.append(workers.start(addresses, index, words, log, LAUNCH[1], folder))
        assert workers.end(started) == [code, code], (folders[1] / "log").read_text()
    expected = written_in(on_one_device("1" if names == UNSEEDED else "0", *names) / name)
    for folder in folders:
        same(expected, written_in(folder))


def fitted(name: str, folder: Path, replicas: int = 2, epochs: int = 2) -> list[Any]:
    """Returns the weights after some epochs of a model that may mix rows."""
    config = TrainConfig(model="script", data="script", job_dir=str(folder), replicas=replicas)
    with opened_run(config, ["fit"], time.monotonic(), None) as run:
        strategy = run.replicas.strategy
        with answered_by_replicas(run.replicas, fit=run.fit), strategy.scope():
            keras.utils.set_random_seed(1)
            seed_initializers(1)  # other tests in this process may have replaced Keras's
            model = getattr(rows_mixed, name)(None, None)
            model.fit(*rows_mixed.table(None), batch_size=40, epochs=epochs)
    return list(model.get_weights())


@pytest.mark.slow
def test_what_is_not_proved_is_compared_here_and_the_weights_are_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Keras cannot write a layer that holds a function.
    monkeypatch.setattr("trainer.run.training_run.rehearse", lambda *_: None)
    unchecked = fitted("shifted", tmp_path / "unchecked")
    monkeypatch.delenv(SKIP)
    checked = fitted("shifted", tmp_path / "checked")
    assert all(map(np.array_equal, unchecked, checked))
    assert "may mix rows, though 5 steps on 1 and on 2 replicas give the same" in caplog.text
    with pytest.raises(UserError, match=r"on 2 replicas .* differs by .*rows_mixed.py:\d+: rolled"):
        fitted("rolled", tmp_path / "rolled")


def test_a_script_that_catches_what_fit_raises_is_not_done(tmp_path: Path) -> None:
    config = TrainConfig(model="script", data="script", job_dir=str(tmp_path))
    x, y = rows_mixed.table(None)
    with opened_run(config, ["fit"], time.monotonic(), None) as run:
        with answered_by_replicas(run.replicas, fit=run.fit):
            model = rows_mixed.noisy(None, None)
            model.fit(x, y, batch_size=40)
            fault = keras.callbacks.LambdaCallback(on_epoch_begin=lambda *_: 1 / 0)
            for others, error in (
                ({"callbacks": [fault]}, ZeroDivisionError),
                ({"validation_data": ([["a"]], y)}, UserError),
            ):
                with pytest.raises(error) as raised:
                    model.fit(x, y, batch_size=40, epochs=2, **others)
                with pytest.raises(UserError, match="the last call of fit failed"):
                    run.end()
        assert str(raised.value).startswith("validation_data: x is a list of lists")


@pytest.mark.slow
def test_a_run_that_goes_on_with_more_replicas_is_checked_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.run.training_run.rehearse", lambda *_: None)
    monkeypatch.delenv(SKIP)
    fitted("rolled", tmp_path / "run", replicas=1)
    with pytest.raises(UserError, match=r"on 2 replicas .* differs by"):
        fitted("rolled", tmp_path / "run", replicas=2, epochs=4)


@pytest.mark.slow
def test_a_pipeline_with_other_rows_is_not_resumed(tmp_path: Path) -> None:
    script = tmp_path / "drawn.py"
    script.write_text(
        "import keras, numpy as np, tensorflow as tf\n"
        "from tests.scripts.shared import Interrupt\n"
        "x = np.random.default_rng().normal(size=(20, 2))\n"
        "model = keras.Sequential([keras.layers.Dense(2)])\n"
        "model.compile('sgd', 'mse')\n"
        "rows = tf.data.Dataset.from_tensor_slices((x, x)).batch(8)\n"
        "model.fit(rows, epochs=3, callbacks=[Interrupt()])\n"
    )
    words = [*LAUNCH, str(script), "found.json", "sent"]
    run(tmp_path, *words, code=75)
    _, printed = run(tmp_path, *words, code=2)
    assert "error: call 1 of fit: its first batches are others than when this run" in printed


NO_CALL = """
import json
import keras, numpy as np, tensorflow as tf

class Network(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])

    def train_step(self, x):
        with tf.GradientTape() as tape:
            loss = keras.ops.mean((self.inner(x) - x) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return {"loss": loss}

model = Network()
model.compile("sgd")
history = model.fit(np.ones((8, 2)), epochs=2)
json.dump(history.history["loss"], open("found.json", "w"))
"""


@pytest.mark.slow
def test_a_script_trains_although_its_model_cannot_be_exported(tmp_path: Path) -> None:
    (tmp_path / "no_call.py").write_text(NO_CALL)
    _, printed = run(tmp_path, *LAUNCH, "no_call.py")
    first, second = written_in(tmp_path)
    assert second < first
    assert "its export fails, tried before training: " in printed
    assert "model     not exported: " in printed
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["state"] == "done"


def test_a_loop_of_its_own_runs_as_it_is(tmp_path: Path) -> None:
    script = tmp_path / "own_loop.py"
    script.write_text(
        "import json, sys, keras, numpy as np\nmodel ="
        " keras.Sequential([keras.layers.Dense(1)])\nmodel.compile('sgd', 'mse')\nfound ="
        " [float(model.train_on_batch(np.ones((4, 2)), np.ones((4, 1)))) for _ in"
        " range(2)]\njson.dump([found[0] > found[1], sys.argv], open('found.json', 'w'))\n"
    )
    found, printed = run(tmp_path, *LAUNCH, "--replicas=2", "own_loop.py", "--rate", "3")
    assert found == [True, ["own_loop.py", "--rate", "3"]]
    assert "own_loop.py calls no fit of Keras: it runs as it is" in printed


def test_mistakes_are_told_in_one_line(tmp_path: Path) -> None:
    for words, line in (
        (["--job_dir=run"], "error: the script is missing: python -m trainer.launch"),
        (["--job_dir=run", "missing.py"], "error: missing.py: no such file"),
        (["--epochs=3", "train.py"], "error: unknown flag --epochs"),
    ):
        _, printed = run(tmp_path, "-m", "trainer.launch", *words, code=2)
        assert line in printed
