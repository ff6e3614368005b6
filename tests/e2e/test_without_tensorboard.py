"""A TensorFlow without the package tensorboard trains, and refuses in one line a callback that
needs it."""

import os
from pathlib import Path

import keras
from keras.callbacks import Callback

from tests.e2e.test_task import ROOT, run
from tests.fixtures import SLOW, parametrize

FLAGS = [
    "--model=tests.user_callbacks:build",
    "--data=tests.user_callbacks:data",
    "--global_batch_size=8",
    "--steps=2",
]


def needing() -> list[Callback]:
    return [keras.callbacks.TensorBoard("logs")]


@SLOW
@parametrize("callbacks", ["", f"{__name__}:needing"])
def test_tensorboard_is_not_needed(callbacks: str, tmp_path: Path) -> None:
    (tmp_path / "lib" / "tensorboard").mkdir(parents=True)
    missing = "raise ModuleNotFoundError(\"No module named 'tensorboard'\", name='tensorboard')\n"
    (tmp_path / "lib" / "tensorboard" / "__init__.py").write_text(missing)
    folders = f"{tmp_path / 'lib'}{os.pathsep}{ROOT}"
    ended = run(
        *FLAGS, f"--job_dir={tmp_path / 'run'}", f"--callbacks={callbacks}", PYTHONPATH=folders
    )
    assert ended.returncode == (2 if callbacks else 0), ended.stderr
    if callbacks:
        *_, line = ended.stderr.splitlines()
        assert line.startswith(
            "error: callbacks: TensorBoard needs the package tensorboard: install it, or leave"
        )
    else:
        assert list((tmp_path / "run" / "logs").glob("events*"))
