"""Tests that a mistake in the user's code is reported with its file and line, and that other
failures are not."""

import importlib
import logging
import re
import sys
from pathlib import Path
from typing import Any

import h5py
import pytest
import tensorflow as tf

from tests import mistakes
from tests.drill import read
from tests.fixtures import Capture, Make, Patch, parametrize
from tests.support import refused, run_job
from trainer import task
from trainer.base.errors import UserError, reason
from trainer.base.log import log
from trainer.user_code import mistakes as user_mistakes
from trainer.user_code.mistakes import as_user_mistake, load_function, message_of

MODEL = "--model=tests.mistakes:"


def line_of(name: str) -> int:
    """Returns the line of tests/mistakes.py that makes this mistake."""
    lines = Path(mistakes.__file__).read_text().splitlines()
    (number,) = (number for number, line in enumerate(lines, 1) if line.endswith(f"  # {name}"))
    return number


@parametrize(
    "name, flags, line",
    [
        (
            "in_build",
            [],
            "in in_build: ValueError: Could not interpret activation function identifier: rleu",
        ),
        ("in_layer", [], "in call: ValueError: Dimensions must be equal"),
        ("in_graph", [], "in _rewritten: KeyError: 'b'"),
        (
            "in_python_function",
            ["--replicas=2"],
            "in _of_numpy: ValueError: cannot reshape array of size",
        ),
        (
            "in_operation",
            ["--replicas=2"],
            "in _checked: InvalidArgumentError: assertion failed: [too bright]",
        ),
        (
            "in_get_config",
            ["--steps=1"],
            "in get_config: AttributeError: 'Misread' object has no attribute 'width'",
        ),
        (
            "in_data",
            ["--model=mlp", "--data=tests.mistakes:in_data"],
            "in in_data: IndexError: index 5 is out of bounds",
        ),
        (
            "in_opening",
            ["--model=mlp", "--data=tests.mistakes:in_opening"],
            "in in_opening: FileNotFoundError: [Errno 2]",
        ),
        (
            "in_callback",
            ["--model=mlp", "--callbacks=tests.mistakes:in_callback"],
            (
                "in on_train_batch_end: RuntimeError: no room for a second line; this is in your"
                " own code"
            ),
        ),
    ],
)
def test_the_users_file_and_line_are_reported(
    small_config: Make, name: str, flags: list[str], line: str
) -> None:
    config = small_config("--replicas=1", f"{MODEL}{name}", *flags)
    place = f"tests/mistakes.py:{line_of(name)} {line}"
    with refused(place):
        run_job(config)
    result = read(Path(config.job_dir) / "result.json")
    assert (result["state"], result["error"].partition(line)[0]) == (
        "failed",
        place.partition(line)[0],
    )


def test_a_mistake_that_shows_in_our_code_is_told_as_theirs_too(small_config: Make) -> None:
    with refused("it is called with (config, dataset), but takes (config: "):
        run_job(small_config(f"{MODEL}takes_one", "--steps=1"))


def test_the_traceback_is_printed_if_asked_for(tmp_path: Path, capsys: Capture) -> None:
    command = [f"{MODEL}in_build", "--data=digits", f"--job_dir={tmp_path / 'job'}"]
    try:
        assert task.main(command) == 2
        assert capsys.readouterr().err.count("\n") == 1
        assert task.main([*command, "--verbose"]) == 2
        assert log.level == logging.DEBUG
    finally:
        log.setLevel(logging.INFO)
    found = capsys.readouterr()
    assert found.err.startswith(
        f"error: tests/mistakes.py:{line_of('in_build')} in in_build: ValueError"
    )
    assert "Traceback (most recent call last)" in found.out
    assert "keras" in found.out


@parametrize(
    "model, value",
    [
        (
            "own_data:classifier",
            "Received a label value of 7 which is outside the valid range of [0, 4)",
        ),
        ("mistakes:embeds", "= 7 is not in [0, 5)"),
    ],
)
def test_a_number_beyond_the_models_is_a_mistake_in_the_data(
    model: str, value: str, small_config: Make
) -> None:
    config = small_config(
        f"--model=tests.{model}", "--data=tests.mistakes:numbers_to_7", "--global_batch_size=64"
    )
    with pytest.raises(
        UserError,
        match=f"hold a number that the model does not allow: .*{re.escape(value)}: classes",
    ):
        run_job(config)


@parametrize(
    "flags, line",
    [
        (["--augment=flip"], "augment=flip: it is for images (height, width, channels): drop it"),
        (
            [
                "--evaluation_fraction=0.5",
                "--callbacks=tests.mistakes:stops_on_what_is_not_evaluated",
            ],
            "callbacks: EarlyStopping of Keras with monitor=val_los: evaluation gives val_loss",
        ),
        (
            [
                "--callbacks=tests.mistakes:stops_on_what_is_not_evaluated",
                "--evaluation_fraction=0",
            ],
            "callbacks: EarlyStopping of Keras with monitor=val_los: nothing is evaluated",
        ),
    ],
)
def test_what_would_have_no_effect_is_refused_in_one_line(
    flags: list[str], line: str, small_config: Make
) -> None:
    with refused(line):
        run_job(
            small_config(
                "--model=tests.mistakes:embeds", "--data=tests.mistakes:numbers_to_7", *flags
            )
        )


def test_a_schedule_is_found_in_a_wrapped_optimizer(small_config: Make) -> None:
    run_job(
        small_config("--model=mlp", "--precision=mixed_float16", "--warmup_steps=3", "--steps=3")
    )


@parametrize(
    "content, line",
    [
        (
            "import tensorflow\nimport no_such_package\n",
            "written.py:2: No module named 'no_such_package'",
        ),
        ("x = 1\ny = (\n", "written.py:2: '(' was never closed"),
        ("\n\nx = {}['gone']\n", "written.py:3: KeyError: 'gone'; this is in your own code"),
    ],
)
def test_a_module_that_cannot_be_imported(
    tmp_path: Path, monkeypatch: Patch, content: str, line: str
) -> None:
    """The module is installed among the libraries, as that of a job is."""
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (installed / "written.py").write_text(content)
    monkeypatch.syspath_prepend(installed)
    monkeypatch.setattr(user_mistakes, "_installed_by_user", set())
    importlib.invalidate_caches()
    with pytest.raises((UserError, KeyError)) as caught:
        load_function("written:build", "model")
    sys.modules.pop("written", None)
    assert line in str(as_user_mistake(caught.value) or caught.value)


STACK = (
    "Graph execution error:\n\nDetected at node x defined at (most recent call last):\n"
    '  File "/home/me/start.py", line 1, in <module>\n\n'
    f'  File "{Path(task.__file__).with_name("job.py")}", line 5, in run\n\n'
)
MINE = '  File "/home/me/mine.py", line 7, in train_step\n\n'
PYTHON = (
    'KeyError: 1\nTraceback (most recent call last):\n\n  File "/home/me/mine.py", line 9, in f\n  '
    "  x\n\nKeyError: 1"
)


@parametrize(
    "error, line",
    [
        (
            tf.errors.InvalidArgumentError(
                None, None, f"{STACK}{MINE}bad value\n\t [[{{{{node x}}}}]] [Op:y]"
            ),
            "/home/me/mine.py:7 in train_step: InvalidArgumentError: bad value;",
        ),
        # only a script that called us
        (tf.errors.InvalidArgumentError(None, None, f"{STACK}bad value"), None),
        (tf.errors.UnavailableError(None, None, f"{STACK}{MINE}a worker is gone"), None),
        (tf.errors.UnknownError(None, None, f"{STACK}{MINE}cuDNN"), None),
        # of an operation outside of graphs
        (tf.errors.UnavailableError(None, None, "Connection reset by peer"), None),
        (
            tf.errors.UnknownError(None, None, f"{STACK}{MINE}{PYTHON}"),
            "/home/me/mine.py:9 in f: KeyError: 1;",
        ),
        (ValueError('in my text: File "/home/me/mine.py", line 7, in f'), None),
        (UserError("x"), None),
    ],
)
def test_failures_of_the_platform_are_not_the_users(error: Any, line: str | None) -> None:
    found = as_user_mistake(error)
    assert (found and str(found).partition(" this is")[0]) == line


IN_USER_CODE = (
    'in user code:\n\n    File "/home/me/mine.py", line 7, in train_step  *\n        x = f(x)\n   '
    ' File "/x/site-packages/keras/layer.py", line 9, in g  **\n        raise\n\n    ValueError:'
    " Shapes\n  differ.\n"
)


@parametrize(
    "text, line, message",
    [
        ("a\n" * 150, "a " * 149 + "a", "ValueError: " + "a " * 143 + "a …"),
        ("word " * 300, "word " * 60 + "…", "ValueError: " + "word " * 57 + "wor …"),
        (IN_USER_CODE, "ValueError: Shapes differ.", "ValueError: Shapes differ"),
        ('no frames: File "/x.py", line 7, in f', 'no frames: File "/x.py", line 7, in f', None),
        ("", "ValueError", None),
    ],
)
def test_a_quoted_error_is_its_cause_and_shows_where_it_is_cut(
    text: str, line: str, message: str | None
) -> None:
    assert reason(ValueError(text)) == line
    assert message is None or message_of(ValueError(text)) == message


def test_a_model_made_at_import_is_refused(small_config: Make) -> None:
    with refused(
        "AT_IMPORT is made when its file is imported: make it in the function, as each replica"
        " needs"
    ):
        run_job(small_config(f"{MODEL}at_import", "--steps=1", "--global_batch_size=8"))


def test_a_misspelt_file_is_named_with_the_most_similar_one(tmp_path: Path) -> None:
    (tmp_path / "table.csv").touch()
    with pytest.raises(FileNotFoundError) as missing:
        (tmp_path / "tabel.csv").open()
    line = str(as_user_mistake(missing.value))
    assert f"test_mistakes.py:{missing.traceback[0].lineno + 1} in " in line
    assert f"; did you mean '{tmp_path / 'table.csv'}'?" in line


def test_a_library_in_c_is_not_the_users_code() -> None:
    with pytest.raises(FileNotFoundError) as missing:
        h5py.File("none/weights.h5", "w")
    assert "test_mistakes.py:" in str(as_user_mistake(missing.value))
