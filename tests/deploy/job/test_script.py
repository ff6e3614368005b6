"""Tests what goes along with a user's script, and that what cannot work is refused with one
line."""

import json
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.__main__ import main
from deploy.in_job.script_worker import torch_variables
from deploy.job.options import JobOptions
from deploy.job.script import Script, read_script
from deploy.packaging.distributions import requirements
from deploy.packaging.image_choice import START
from tests.deploy.conftest import WHERE, Capture, Command, error_of, start_of, variables_of
from tests.deploy.planted import write_files

TRAIN = """\
import helper
from nets import task
open("data/table.csv"), open("lost.csv", "w")
"""
FILES = {
    "train.py": TRAIN,
    "helper.py": "",
    "data/table.csv": "1,2\n",
    "requirements.txt": "numpy\n",
    "nets/task.py": "PHOTOS = f'pho{1}os'",
    "nets/__init__.py": "",
    "photos/a/1.png": "",
    "photos/2.png": "",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Returns the working folder, with a script in it, and with what must not go along."""
    folder = tmp_path / "work"
    more = (
        "runs/old/stats.jsonl dist/old.whl env/pyvenv.cfg env/lib/x.py a.ipynb .git/HEAD"
        " nets/other.py nets/requirements.txt lost.csv submit.log photos/.hidden"
    )
    return write_files({**FILES, **dict.fromkeys(more.split(), "")}, folder)


def names(archive: Path, below: str) -> set[str]:
    with zipfile.ZipFile(archive) as opened:
        return {name.removeprefix(below) for name in opened.namelist() if name.startswith(below)}


def asked(words: Sequence[str] = (), **options: Any) -> Script:
    return read_script(JobOptions(**options), words, {})


def test_what_a_script_reaches_goes_along_and_nothing_else(project: Path) -> None:
    """The modules that it imports, what it names in its text or its arguments, and no log of
    `submit` beside it."""
    package = asked(script="train.py").package()
    assert names(package.build(), "code/") == FILES.keys()
    assert "ours/in_job/importable/vertex_report.py" in names(package.build(), "")
    assert (
        package.about
        == "ships data/ (1), helper.py, nets/ (2), photos/ (2), requirements.txt, train.py: 8"
        " files, 0.0 MB; 6 left out: a.ipynb, dist/, env/, lost.csv, runs/, submit.log"
    )
    before = package.build().read_bytes()
    package.build().unlink()
    assert package.build().read_bytes() == before, "the archive depends on its files alone"
    (project / ".gcloudignore").write_text("photos/\n")
    given = asked(["--log=submit.log", "x"], script="train.py", include=("nets/oth*",)).package()
    photos = {"photos/a/1.png", "photos/2.png"}
    assert names(given.build(), "code/") == {*FILES, "submit.log", "nets/other.py"} - photos


def test_a_modules_package_goes_along_under_its_name(project: Path) -> None:
    """Its requirements.txt, in it or beside it, is where the job looks for it."""
    module = {"nets/task.py", "nets/__init__.py", "nets/other.py"}
    found = asked(module="nets.task").files
    assert found.keys() == {*module, "nets/requirements.txt", "requirements.txt"}
    assert found["requirements.txt"] == project / "nets" / "requirements.txt"
    (project / "nets" / "requirements.txt").unlink()
    found = asked(module="nets.task", package="nets").files
    assert found["requirements.txt"].samefile(project / "requirements.txt")
    (project / "requirements.txt").write_text("--index-url https://me:pa55@pypi.example.com/simple")
    line = (
        "package: these look like credentials: requirements.txt, line 1 (a login in an address): "
    )
    assert line in error_of(asked(module="nets.task", package="nets").package)


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("photos/key.pem", "", "these look like credentials: photos/key.pem, a credential by its"),
        (
            "data/table.csv",
            "x" * 3_000_000,
            "script=train.py: data/table.csv (train.py, line 3) has 3.0 MB, and at most 1 MB go",
        ),
        ("helper.py", "def", "helper.py, line 1: invalid syntax: the job could not import it"),
        (
            "helper.py",
            "a = 1\0",
            "package: helper.py: source code string cannot contain null bytes",
        ),
        (
            "helper.py",
            "X = '/dev/null'; Y = '../../data'",
            "{outside}/data gs://BUCKET/`, and write /gcs/BUCKET/data; or use --force",
        ),
        (
            "helper.py",
            "X = '{here}/data/table.csv'",
            "names {here}/data/table.csv, which the job's machines cannot read: write",
        ),
    ],
)
def test_what_must_not_go_along_is_refused(
    name: str, content: str, line: str, project: Path, refused: Command
) -> None:
    (project.parents[1] / "data").mkdir(exist_ok=True)
    (project / name).write_text(content.format(here=project))
    line = line.format(here=project, outside=project.parents[1])
    flags = ["--script=train.py", "--max_package_mb=1", "--dry_run"]
    assert line in refused("submit", "cpu", *flags, *WHERE)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["--script=none.py"],
            "script=none.py: there is no such Python file. give the path of one",
        ),
        (
            ["--script=trian.py"],
            "script=trian.py: there is no such Python file; did you mean 'train.py'? give the",
        ),
        (
            ["--script=train.py", "--module=nets.task"],
            "--script and --module contradict each other: drop one of them",
        ),
        (
            ["--script=train.py", "--steps=3"],
            "unknown flag --steps. The arguments of your script follow --; what compile and fit ",
        ),
        (
            ["--script=train.py", "zzz"],
            "write --name=value. The arguments of your script follow --",
        ),
        (
            ["--recipe=mlp_mnist", "--", "x"],
            "what follows -- is for a script of yours: name it by --script=FILE or",
        ),
        (["--module=a-b"], "module=a-b: there is no such program in "),
        (
            ["--script=train.py", "--as_is", "--launch"],
            "--as_is and --launch contradict each other: drop one of them",
        ),
        (
            ["--script=train.py", "--launch", "--epochs=3"],
            "unknown flag --epochs. The arguments of your script follow --; what compile and fit ",
        ),
        (["--script=train.py", "--batch_size=8"], "unknown flag --batch_size. The arguments of"),
        (
            ["--script=train.py", "--as_is", "--replicas=2"],
            "replicas is no setting of a script that runs as it is",
        ),
        (["--script=train.py", "--include=nothing*"], "include=nothing*: nothing in "),
        (
            ["--script=trainer/fits.py"],
            "script=trainer/fits.py: trainer beside it would hide this package: rename it",
        ),
        (["--module=nets.task", "--launch"], "--launch is for a file: name it by --script=FILE"),
        (
            ["--script=train.py", "--job_dir=held"],
            "job_dir=held: it holds a run of other.py: use another --job_dir",
        ),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], line: str, project: Path, refused: Command
) -> None:
    fits = "import keras, trainer\nkeras.Sequential().fit(1)"
    write_files({"fits.py": fits, "trainer.py": ""}, "trainer")
    write_files({"run.json": '{"config": {"script": "other.py"}}'}, "held")
    assert line in refused("local", "cpu", *arguments)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["submit", "cpu", "--check"],
            "--check trains a recipe on the tier's GPUs, not a script: drop --check",
        ),
        (
            ["submit", "cpu", "--plan"],
            "--plan is for recipes: the memory of a script is not known: drop it",
        ),
        (
            ["submit", "cpu", "--package=nets"],
            "--script and --package contradict each other: what the script needs goes",
        ),
        (
            ["submit", "cpu", "--job_dir=here"],
            "job_dir=here: the job's machines cannot read this disk",
        ),
        (
            ["compare", "cpu", "--scaling=weak", "--on=vertex"],
            "--scaling=weak changes the batch of a recipe; that of",
        ),
        (
            ["compare", "cpu", "--job_dir=x", "--on=vertex"],
            "--job_dir is not for a comparison: --out names the folder",
        ),
    ],
)
def test_flags_that_do_not_fit_a_script_are_refused(
    arguments: list[str], line: str, project: Path, refused: Command
) -> None:
    assert line in refused(*arguments, "--script=train.py", *WHERE, "--project=p")


def test_a_dry_run_says_what_goes_along_and_quotes_what_would_run(
    project: Path, capsys: Capture
) -> None:
    words = ["--name", "two words", '"quoted"', "it's", "", "$(HOME)", "--", "--steps=3"]
    flags = ["--max_cost=20", "--spot", "--labels=team=vision", "--project=p", "--spec"]
    assert main(["submit", "l4x1-2workers", "--script=train.py", *WHERE, *flags, "--", *words]) == 0
    text, shown = capsys.readouterr()
    said = (
        "runs python train.py --name 'two words' '\"quoted\"' 'it'\"'\"'s' '' '$(HOME)' --"
        " --steps=3, as it is: it "
    )
    assert f"{said}calls no fit of Keras\n" in shown
    assert "train.py: 8 files, 0.0 MB; " in shown
    assert "runs in python:3.12-slim, with numpy: --image=URI names another" in shown
    assert (
        "warning: SPOT: the script is ended by SIGTERM and started again: only what it saved itself"
        in shown
    )
    assert len(START.splitlines()) <= 10
    spec = yaml.safe_load(text)
    assert spec["scheduling"]["strategy"] == "SPOT"
    for pool in spec["workerPoolSpecs"]:
        task = pool["containerSpec"]
        assert task["args"] == words
        assert task["command"][2] == START
        assert task["imageUri"] == "python:3.12-slim"
        start = start_of(task)
        assert start["gpus"] == 1
        assert start["script"]["command"] == ["train.py"]
        assert start["requirements"] == ["numpy"]
        assert start["code"][0].startswith("gs://my-bucket/packages/train-0-")
        assert "LD_LIBRARY_PATH" in variables_of(task)


UNLIKE = """
workerPoolSpecs:
  - &chief
    machineSpec: {machineType: g2-standard-24, acceleratorType: NVIDIA_L4, acceleratorCount: 2}
    replicaCount: 1
    diskSpec: {bootDiskType: pd-ssd, bootDiskSizeGb: 100}
    pythonPackageSpec: {pythonModule: trainer.task}
  - {<<: *chief, machineSpec: {machineType: n1-standard-8}, replicaCount: 2}
  - machineSpec: {machineType: n1-highcpu-16}
    replicaCount: 3
    containerSpec: {imageUri: gcr.io/x/reduction}
  - {<<: *chief, machineSpec: {machineType: n1-standard-8}}
scheduling: {timeout: 3600s}
"""


def test_a_script_keeps_unlike_machines_a_reduction_server_and_an_evaluator(
    project: Path, capsys: Capture
) -> None:
    """The trainer refuses them: wrong_inputs.py."""
    Path("unlike.yaml").write_text(UNLIKE)
    assert (
        main(["submit", "unlike.yaml", "--script=train.py", *WHERE, "--project=p", "--spec"]) == 0
    )
    text, shown = capsys.readouterr()
    tasks = [pool["containerSpec"] for pool in yaml.safe_load(text)["workerPoolSpecs"]]
    assert tasks.pop(2) == {"imageUri": "gcr.io/x/reduction"}
    starts = [*map(start_of, tasks)]
    assert [start["gpus"] for start in starts] == [2, 0, 0]
    assert starts[0]["script"]["about"]["cluster"] == {"workers": 3, "replicas": 6}
    usd = 1.15 * (2.00083 + 3 * 0.38 + 3 * 0.56679) + 7 * 100 * 0.17 / 730
    assert f"unlike: {usd:.2f} USD an hour" in shown
    cluster = {f"workerpool{place}": ["a:1"] for place in (0, 1, 3)}
    last = json.dumps({"cluster": cluster, "task": {"type": "workerpool3", "index": 0}})
    assert torch_variables({"CLUSTER_SPEC": last})["RANK"] == "2"


def test_a_link_to_a_script_ships_the_folder_that_was_named(project: Path) -> None:
    (project / "link.py").symlink_to(project / "nets" / "task.py")
    found = asked(script="link.py")
    assert found.folder == project
    assert found.command == ("link.py",)


IMPORTS = """\
import os, helper, vertex_report
from nets.task import x
try:
    import torch
except ImportError:
    torch = None
def plot():
    import matplotlib, nothing_here
if __name__ == "__main__":
    import google.cloud.storage, missing_module
"""


@pytest.mark.parametrize(
    ("listed", "flags", "line", "code"),
    [
        ("", [], "train.py, line 10, imports missing_module, which is not installed here", 2),
        ("", ["--force"], f"{requirements(0)[0]} {requirements(0)[1]}", 0),
        ("Pillow>=10", [], "with Pillow>=10: --image", 0),
        ("", ["--image=us-docker.pkg.dev/p/r/x:1"], "runs in us-docker.pkg.dev/p/r/x:1", 0),
    ],
)
def test_what_code_imports_is_installed_or_refused_before_it_is_paid_for(
    listed: str, flags: list[str], line: str, code: int, project: Path, typed: Command
) -> None:
    """As installed here: in a function, too, and of a namespace the part; what is optional may be
    missing."""
    nets = "import PIL.Image, keras\nx = 1"
    write_files({"train.py": IMPORTS, "nets/task.py": nets, "plot.py": "import seaborn"})
    Path("requirements.txt").write_text(listed)
    if not listed:
        Path("requirements.txt").unlink()
    flags = ["--script=train.py", *WHERE, "--project=p", "--dry_run", *flags]
    said = typed("submit", "cpu", *flags, code=code)
    assert line in said
    if flags[-1] == "--force":
        assert "matplotlib>=" in said
        assert "google-cloud-storage>=" in said
        assert "aiplatform" not in said
    assert not re.search("seaborn|torch|nothing_here", said)


@pytest.mark.parametrize(
    ("code", "trains"),
    [
        ("import keras\nmodel = keras.Sequential()\nmodel.fit(x)", True),
        ("from mine import build\nbuild().fit(x)", True),
        (
            "import keras\nfrom sklearn.svm import SVC\nmodel = SVC()\nmodel.fit(x)\nSVC().fit(x)",
            False,
        ),
        (
            (
                "import keras, sklearn\nscale = sklearn.preprocessing.Scaler()\nscale.fit(x)\nmodel"
                " = f()\nmodel.fit(x)"
            ),
            True,
        ),
        ("import xgboost as xgb\nmodel = xgb.XGBClassifier()\nmodel.fit(x)", False),
        ("import torch, lightning\ntrainer = lightning.Trainer()\ntrainer.fit(model)", False),
        ("import keras\nmodel.train_on_batch(x)", False),
        ("import keras\nfrom vertex_report import report\nmodel.fit(x)", False),
    ],
)
def test_a_script_that_calls_fit_of_keras_is_launched(
    code: str, trains: bool, project: Path
) -> None:
    (project / "mine.py").write_text("from keras import Model\ndef build(): return Model()")
    (project / "train.py").write_text(code)
    assert asked(script="train.py").launched == trains
    forced = asked(script="train.py", as_is=True), asked(script="train.py", launch=True)
    assert [made.launched for made in forced] == [False, True]
