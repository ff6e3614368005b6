"""Tests that keyword-only parameters of a user's functions are settings like ours, read without
importing them."""

import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from numpy.testing import assert_array_equal

from deploy.__main__ import main as deploy
from tests.drill import read
from tests.fixtures import Capture, Patch, parametrize
from tests.support import refused, resolved, run_job
from trainer.base.run_files.job_directory import open_job_dir
from trainer.base.settings.own_settings import (
    read_parameters,
    refuse_missing_modules,
    type_and_default,
)
from trainer.base.settings.request import Overrides, to_recipe
from trainer.base.settings.train_config import TrainConfig

NETS = """
import keras
from typing import Annotated, Literal, Optional
WIDE = 32
import tests.own_data

Depth = Literal[2, 4]

def build(config, dataset, old=1, *, my_lambda: float = 0.3, depth: Depth = 2,
          units: Annotated[int, "units of the hidden layer"] = WIDE, act: str | None = None,
          l2: Optional[float] = 1e-4, bias=True, _cache=None):
    dense = keras.layers.Dense
    model = keras.Sequential([keras.Input((4,)), dense(units, act), dense(1, use_bias=bias)])
    optimizer = keras.optimizers.SGD(config.learning_rate)
    model.compile(optimizer, loss=lambda y, p: my_lambda * (y - p[:, 0]) ** 2)
    return model
"""
DATA = """
import numpy as np

def load(config, *, my_lambda: float = 0.3, rows: int):
    x = np.random.default_rng(0).normal(size=(rows, 4))
    return x, x.sum(axis=1) * my_lambda
"""
OWN = ["--model=mine.nets:build", "--data=mine.data:load"]
RUN = [
    *OWN,
    "--rows=24",
    "--global_batch_size=8",
    "--steps=2",
    "--tensorboard=false",
    "--checkpoint_every_steps=1",
]
ANNOTATED = "from typing import Annotated\nfrom trainer.base.settings.fields import Setting\n"
ANNOTATED += "def build(c, d, *, a: Annotated["
FORBIDDEN = "raise AssertionError('a package of the user must not be imported here')"


def write(folder: Path, **modules: str) -> Path:
    """Writes the package `mine`, whose __init__ must not run unless it is given, and returns its
    folder."""
    package = folder / "mine"
    package.mkdir(parents=True, exist_ok=True)
    for name, source in {"__init__": FORBIDDEN, **modules}.items():
        (package / f"{name}.py").write_text(source, encoding="utf-8")
    return package


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: Patch) -> Iterator[Path]:
    """The package `mine` in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield write(tmp_path, nets=NETS, data=DATA)
    for name in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
        del sys.modules[name]
    importlib.invalidate_caches()


def test_they_are_flags_and_fields_like_ours(mine: Path) -> None:
    config = resolved(
        *OWN, "--rows=1e2", "--my-lambda", "0.5", "--no_bias", "--depth=4", "--l2=none"
    )
    found = {
        name: getattr(config, name)
        for name in ("my_lambda", "depth", "units", "act", "l2", "bias", "rows")
    }
    assert found == {
        "my_lambda": 0.5,
        "depth": 4,
        "units": 32,
        "act": None,
        "l2": None,
        "bias": False,
        "rows": 100,
    }
    assert {*asdict(config)} - {field.name for field in fields(TrainConfig)} == {*found}
    assert config == resolved(
        *OWN, "--rows=100", "--my_lambda=.5", "--bias=no", "--depth=4", "--l2=None"
    )
    assert resolved("--model=mlp", "--data=mine.data:load", "--rows=9").model == "mlp"


def test_they_are_keys_of_a_recipe(mine: Path, tmp_path: Path) -> None:
    config = resolved(*OWN, "--rows=9", "--l2=none", "--act=relu")
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(to_recipe(config))
    again = resolved(f"--recipe={recipe}", "--depth=4")
    changed: dict[str, Any] = {"recipe": "", "depth": 2}
    assert replace(again, **changed) == config
    recipe.write_text("model: mine.nets:build\ndepht: 4\n")
    with refused(f"recipe={recipe}: unknown setting 'depht'; did you mean 'depth'?"):
        resolved(f"--recipe={recipe}")


def test_those_of_another_built_in_model_are_left_out_of_a_recipe_and_refused_as_flags() -> None:
    config = vars(resolved("--recipe=wgan_gp_digits", "--model=dcgan"))
    assert (config["conditional"], config["ema_decay"], "critic_steps" in config) == (
        True,
        0.998,
        False,
    )
    with refused(
        "--help=all lists them all (critic_steps is a setting of wgan_gp, not of model=dcgan)"
    ):
        resolved("--recipe=wgan_gp_digits", "--model=dcgan", "--critic_steps=2")


@parametrize(
    "flags, line",
    [
        (
            ["--rows=9", "--my_lamda=1"],
            "unknown flag --my_lamda; did you mean 'my_lambda'? --help=all lists them all",
        ),
        (["--rows=9", "--depth=3"], "depth=3 must be one of 2, 4."),
        (["--rows=9", "--lr=3"], "unknown flag --lr: use --learning_rate"),
        (["--rows=9", "--bias=perhaps"], "bias='perhaps' must be true or false"),
        ([], "rows is missing, one of the settings of data=mine.data:load: use --rows=VALUE"),
        (
            ["--rows=9", "--old=2"],
            "(settings of model=mine.nets:build and data=mine.data:load are the parameters after a",
        ),
        (
            ["--model=elsewhere.nets:build", "--rows=9", "--my_lambda=1", "--width2=1"],
            (
                "unknown flag --width2. --help=all lists them all (settings of your own functions"
                " are not known: model=elsewhere.nets:build: elsewhere.nets is not found here)"
            ),
        ),
    ],
)
def test_a_wrong_value_is_one_line(mine: Path, flags: list[str], line: str) -> None:
    with refused(line):
        resolved(*OWN, *flags)


@parametrize(
    "source, line",
    [
        (
            "def build(c, d, *, learning_rate=0.1): pass",
            "has the name of a flag of the trainer: read config.learni",
        ),
        ("def build(c, d, *, no_tf32=True): pass", "read config.tf32, or rename the parameter"),
        (
            "def build(c, d, *, a: float = 1 / 3): pass",
            "mine/nets.py:1: its setting a has a default that is not a literal",
        ),
        (
            "A = len('x')\ndef build(c, d, *, a: int = A): pass",
            "its setting a has a default that is not a literal",
        ),
        (
            "def build(c, d, *, a: list[int] = 1): pass",
            "its setting a is of type list[int]: use bool, int, float, str, a",
        ),
        (
            "from typing import Literal\ndef build(c, d, *, a: Literal[1, 'x'] = 1): pass",
            "is of type Literal[1, 'x']: use",
        ),
        ("def build(c, d, *, a=None): pass", "its setting a has no type: use bool"),
        (
            "def build(c, d, *, a: int = None): pass",
            "its setting a is int = None: the default must be of its type",
        ),
        (
            f"{ANNOTATED}int, Setting('x', minimum=2)] = 1): pass",
            "its default does not fit: a=1 must be at least 2",
        ),
        (
            f"{ANNOTATED}str, Setting('x', minimum=2)] = ''): pass",
            "of type Annotated[str, Setting('x', minimum=2)]: use",
        ),
        (
            "def build(c, d, *, my_lambda: int = 3): pass",
            (
                "model=mine.nets:build and data=mine.data:load both have a setting my_lambda, as"
                " int = 3 and as float = 0.3: "
            ),
        ),
        (
            "def biuld(c, d): pass",
            "model=mine.nets:build: mine.nets has no function build; did you mean 'biuld'?",
        ),
        ("from .data import build", "model=mine.nets:build: mine.data has no function build."),
        (
            "def build(c, d, *, a=1:\n  pass",
            "model=mine.nets:build: cannot import mine.nets (mine/nets.py:1: ",
        ),
        (
            "from .other import build",
            "model=mine.nets:build: cannot import mine.other (mine/other.py:1: invalid",
        ),
        (
            "# coding: no-such\ndef build(c, d, *, a=1): pass",
            "cannot import mine.nets (unknown encoding: no-such)",
        ),
    ],
)
def test_what_cannot_be_a_setting_is_one_line_that_names_the_place(
    mine: Path, source: str, line: str
) -> None:
    write(mine.parent, nets=source, other="def def")
    with refused(line):
        resolved(*OWN, "--rows=9")


@parametrize(
    "source, expected",
    [
        ("def build(c, d, *, a=1): pass\ndef build(c, d, *, a=2): pass", "int = 2"),
        ("from .other import make as build", "float = 0.5"),
        ("from .deeper import build", "int = -4"),
        (
            "import functools\ndef plain(f): return f\n@plain\ndef build(c, d, *, a=4): pass",
            "int = 4",
        ),
        ("class build:\n  def __init__(self, c, d, *, a=6): pass", "int = 6"),
        ("HALF: float = 0.5\ndef build(c, d, *, a: float = HALF): pass", "float = 0.5"),
        (
            (
                "from typing import Literal\nKind = Literal['x', 'y']\ndef build(c, d, *, a: Kind ="
                " 'y'): pass"
            ),
            "Literal['x', 'y'] = 'y'",
        ),
        (
            "import typing as t\ndef build(c, d, *, a: t.Optional[t.Literal[1, 2]] = 1): pass",
            "Literal[1, 2] | None = 1",
        ),
        (
            "from typing import *\ndef build(c, d, *, a: Union[float, None] = 1): pass",
            "float | None = 1.0",
        ),
        (f"{ANNOTATED}int, Setting(meaning='x', maximum=2), 'y'] = 1): pass", "int = 1"),
        ("# -*- coding: latin-1 -*-\ndef build(c, d, *, a='é'): pass", "str = 'Ã©'"),
    ],
)
def test_definitions_of_all_kinds_are_read(mine: Path, source: str, expected: str) -> None:
    other = "HALF = 0.5\ndef build(c, d, *, a='x'): pass\ndef make(c, d, *, a: float = HALF): pass"
    deeper = {
        "deeper": "from .deepest import build",
        "deepest": "def build(c, d, *, a: int = -4): pass",
    }
    write(mine.parent, nets=source, other=other, **deeper)
    parameters = read_parameters("mine.nets:build", "model")
    assert {name: type_and_default(field) for name, field in parameters.items()} == {"a": expected}


@parametrize(
    "source",
    [
        "from functools import partial\ndef f(c, d, *, a): pass\nbuild = partial(f, a=3)",
        "from .nets import build",
        "import keras as build",
        "globals()['bu' + 'ild'] = print",
        "from typing import Any as build",
        "class build(dict): pass",
        "from .... import build",
        "def build(c, d, **kwargs): pass",
        "from mine.other import *",
        "build = lambda c, d, *, a=5: None",
        "if True:\n  def build(c, d, *, a=3): pass",
        "build = x" + "+x" * 20_000,
        "build = build",
    ],
)
def test_what_does_not_stand_in_a_source_has_no_settings(mine: Path, source: str) -> None:
    write(mine.parent, nets=source)
    assert Overrides.read({"model": "mine.nets:build"}).functions.settings is TrainConfig
    with refused("unknown flag --a"):
        resolved(OWN[0], "--a=3")


@parametrize(
    "model, line",
    [
        (
            "mime.nets:build",
            "cannot import mime.nets (No module named 'mime'); did you mean 'mine'?",
        ),
        ("mine/nets.py:build", "a module has no .py: use --model=mine.nets:build"),
    ],
)
def test_a_module_that_is_not_there_is_refused_with_the_nearest(
    mine: Path, model: str, line: str
) -> None:
    with refused(line):
        refuse_missing_modules(TrainConfig(model=model))
    refuse_missing_modules(
        TrainConfig(model="mine.nest:build", data="mine.data:load", callbacks="mine.nets:make")
    )


@pytest.mark.usefixtures("dist")
def test_the_desk_reads_the_package_that_is_shipped(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    """The package lies elsewhere; a module of its name in the current folder has other settings."""
    package = write(tmp_path / "code", nets=NETS, data=DATA)
    write(tmp_path / "here", nets="def build(c, d, *, other: int = 1): pass")
    monkeypatch.chdir(tmp_path / "here")
    # a job has no `tests`
    where = ["--region=us-central1", "--bucket=gs://my-bucket", "--project=p", "--force"]
    flags = ["l4x1", *OWN, *where, "--name=demo", f"--package={package}"]
    assert deploy(["submit", "--spec", *flags, "--rows=9", "--depth", "4", "--l2=none"]) == 0
    arguments = yaml.safe_load(capsys.readouterr().out)["workerPoolSpecs"][0]["containerSpec"][
        "args"
    ]
    assert {"--rows=9", "--depth=4", "--l2=none"} <= {*arguments}
    assert deploy(["submit", "--spec", *flags, "--rows=9", "--other=1"]) == 2
    assert "unknown flag --other. --help=all lists those of this verb" in capsys.readouterr().err
    write(package.parent, data="def load(config, *, bucket: str = 'b'): pass")
    assert deploy(["submit", "--spec", *flags, "--rows=9"]) == 2
    assert (
        "--bucket is a flag of `python -m deploy submit` and a setting of your own"
        in capsys.readouterr().err
    )


@pytest.mark.usefixtures("dist")
def test_a_recipe_file_and_a_tier_pass_them_on(mine: Path, tmp_path: Path, capsys: Capture) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("model: mine.nets:build\ndata: mine.data:load\nrows: 9\nl2: null\n")
    where = [
        "--region=us-central1",
        "--bucket=gs://my-bucket",
        "--project=p",
        "--name=demo",
        f"--package={mine}",
    ]
    where.append("--force")  # a job has no `tests`
    flags = [f"--recipe={recipe}", "--my_lambda=1", "--act=mine.yaml"]
    assert deploy(["submit", "--spec", "l4x1", *where, *flags]) == 0
    shown = capsys.readouterr()
    assert (
        "warning: act=mine.yaml: this path exists here, but the job's machines cannot" in shown.err
    )
    spec = yaml.safe_load(shown.out)
    pool = spec["workerPoolSpecs"][0]
    assert {"--rows=9", "--l2=none", "--my_lambda=1.0"} <= {*pool.pop("containerSpec")["args"]}
    pool["pythonPackageSpec"] = {"pythonModule": "trainer.task", "args": [*OWN, "--rows=5"]}
    (tmp_path / "tier.yaml").write_text(yaml.safe_dump(spec))
    assert deploy(["submit", "--spec", str(tmp_path / "tier.yaml"), *where]) == 0
    assert vars(Overrides.parse(["--rows=7", *OWN]).config)["rows"] == 7


def test_a_run_uses_records_and_guards_them_and_those_of_callbacks_alone_may_change(
    mine: Path, tmp_path: Path
) -> None:
    stop = "import keras\ndef stop(*, after: int = 5, my_lambda: float = 0.3):\n"
    stop += (
        "    class Stop(keras.callbacks.Callback):\n        def on_train_batch_end(self, batch,"
        " logs=None):\n"
    )
    stop += "            self.model.stop_training = batch + 1 >= after\n    return [Stop()]\n"
    write(tmp_path, __init__="", stops=stop)
    flags = [
        *RUN,
        f"--job_dir={tmp_path / 'run'}",
        "--my_lambda=0.5",
        "--units=3",
        "--steps_per_loop=1",
    ]
    flags += ["--callbacks=mine.stops:stop"]
    job_dir = run_job(resolved(*flags, "--steps=1"))
    stored = read(job_dir / "run.json")
    assert {name: stored["config"][name] for name in ("my_lambda", "units", "rows")} == {
        "my_lambda": 0.5,
        "units": 3,
        "rows": 24,
    }
    assert stored["data"]["examples"] == 24
    with refused("contains another run (my_lambda: 0.5 before, 0.6 now): use another --job_dir"):
        open_job_dir(resolved(*flags, "--my_lambda=0.6"))
    run_job(resolved(*flags, "--steps=9", "--after=2"))
    assert [
        json.loads(line)["step"] for line in (job_dir / "stats.jsonl").read_text().splitlines()
    ][-1] == 2


@parametrize(
    "source, line",
    [
        (
            (
                "def hides(f): return lambda *a, **k: f(*a, **k)\n@hides\ndef load(config, *,"
                " a=0.5): return X * a"
            ),
            "",
        ),
        (
            (
                "def drops(f): return lambda config: f(config)\n@drops\ndef load(config, *, a=0.5):"
                " return X * a"
            ),
            (
                "data=mine.data:load: it is called with (config, a=), but takes (config): got an"
                " unexpected keyword argument 'a'"
            ),
        ),
        (
            (
                "from functools import partial\ndef f(config, *, b): return X * b\nload ="
                " partial(f, b=0.5)"
            ),
            "",
        ),
    ],
)
def test_the_imported_function_must_take_what_its_source_shows(
    mine: Path, source: str, line: str
) -> None:
    from trainer.user_code.mistakes import load_function

    write(mine.parent, __init__="", data=f"import numpy\nX = numpy.ones((9, 4))\n{source}\n")
    config = resolved(OWN[1], "--global_batch_size=1")
    with refused(line) if line else nullcontext():
        examples = load_function(config.data, "data", ("config",), config)(config)
        assert_array_equal(examples, np.full((9, 4), 0.5))
