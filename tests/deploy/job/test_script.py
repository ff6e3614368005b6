"""Tests what goes along with a user's script, and that what cannot work is refused with one line."""

import json
import zipfile
from pathlib import Path

import pytest
import yaml

from deploy.__main__ import main
from deploy.in_job.script_worker import torch_variables
from deploy.job.script import read_script
from deploy.packaging.images import START, requirements
from tests.deploy.conftest import WHERE, Capture, Command, error_of

FILES = {"train.py": "print('trains')\n", "helper.py": "", "data/table.csv": "1,2\n", "requirements.txt": "numpy\n"}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Returns the working folder, with a script in it, and with what must not go along."""
    folder = tmp_path / "work"
    more = {
        "runs/old/stats.jsonl": "", "dist/old.whl": "", "env/pyvenv.cfg": "", "env/lib/x.py": "", "a.ipynb": "{}",
        ".git/HEAD": "", "nets/task.py": "", "nets/requirements.txt": "torch\n", "nets/__init__.py": "",
    }  # fmt: skip
    for name, content in {**FILES, **more}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


def names(archive: Path, below: str) -> set[str]:
    with zipfile.ZipFile(archive) as opened:
        return {name.removeprefix(below) for name in opened.namelist() if name.startswith(below)}


def test_the_folder_goes_along_without_what_this_package_writes(project: Path) -> None:
    package = read_script("train.py", "", "", ["a"]).package()
    assert names(package.build(), "code/") == {*FILES, "nets/task.py", "nets/requirements.txt", "nets/__init__.py"}
    assert "ours/in_job/importable/vertex_report.py" in names(package.build(), "")
    about = "ships work: 7 files, 0.0 MB; 4 left out: work/a.ipynb, work/dist/, work/env/, work/runs/; "
    assert package.about == f"{about}vertex_report.py; requirements.txt is installed at each start"
    before = package.build().read_bytes()
    package.build().unlink()
    assert package.build().read_bytes() == before, "the archive depends on its files alone"


def test_a_modules_package_goes_along_under_its_name(project: Path) -> None:
    """Its requirements.txt, in it or beside it, is where the job looks for it."""
    package = read_script("", "nets.task", "", []).package()
    code = {name.removeprefix("code/"): content for name, content in package.files.items() if name.startswith("code/")}
    assert code.keys() == {"nets/task.py", "nets/__init__.py", "nets/requirements.txt", "requirements.txt"}
    assert code["requirements.txt"] == project / "nets" / "requirements.txt"
    (project / "nets" / "requirements.txt").unlink()
    assert (
        read_script("", "nets.task", "nets", [])
        .package()
        .files["code/requirements.txt"]
        .samefile(project / "requirements.txt")
    )
    (project / "requirements.txt").write_text("--index-url https://me:pa55@pypi.example.com/simple")
    line = "package: these look like credentials: requirements.txt, line 1 (Basic Auth Credentials): "
    assert line in error_of(read_script("", "nets.task", "nets", []).package)


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("key.pem", "", "these look like credentials: work/key.pem, a credential by its name: they would be"),
        ("big.bin", "x" * 3_000_000, "3.0 MB in 8 files, the largest work/big.bin with 3.0: a package holds code, at"),
        ("bad.py", "def", "bad.py, line 1: invalid syntax: the job could not import it: fix it"),
        (".gitignore", "train.py", "script=train.py: it would not be shipped: .gitignore or .gcloudignore names it"),
    ],
)
def test_what_must_not_go_along_is_refused(name: str, content: str, line: str, project: Path, refused: Command) -> None:
    (project / name).write_text(content)
    assert line in refused("submit", "cpu", "--script=train.py", "--max_package_mb=1", *WHERE, "--dry_run")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--script=none.py"], "script=none.py: there is no such Python file. give the path of one"),
        (["--script=trian.py"], "script=trian.py: there is no such Python file; did you mean 'train.py'? give the"),
        (["--script=data"], "script=data: there is no such Python file"),
        (["--script=train.py", "--module=nets.task"], "--script and --module contradict each other: drop one of them"),
        (
            ["--script=train.py", "--steps=3"],
            "steps is a setting of this package's training, not of a script. The arguments of your",
        ),
        (
            ["--script=train.py", "zzz"],
            "write --name=value. The arguments of your script follow --",
        ),
        (["--recipe=mlp_mnist", "--", "x"], "what follows -- is for a script of yours: name it by --script=FILE or"),
        (["--module=a-b"], "module=a-b: there is no such program in "),
        (["--module=nets.tasks"], "module=nets.tasks: there is no such program in "),
        (["--module=nets"], "module=nets: there is no such program in "),
        (["--script=train.py", "--job_dir=held"], "job_dir=held: it holds a run of other.py: use another --job_dir"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], line: str, project: Path, refused: Command) -> None:
    (project / "held").mkdir()
    (project / "held" / "run.json").write_text('{"config": {"script": "other.py"}}')
    assert line in refused("local", "cpu", *arguments)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["submit", "cpu", "--check"], "--check trains a recipe on the tier's GPUs, not a script: drop --check"),
        (["submit", "cpu", "--plan"], "--plan is for recipes: the memory of a script is not known: drop it"),
        (["submit", "cpu", "--package=nets"], "--script and --package contradict each other: the script's folder goes"),
        (["submit", "cpu", "--job_dir=here"], "job_dir=here: the job's machines cannot read this disk"),
        (["compare", "cpu", "--scaling=weak", "--on=vertex"], "--scaling=weak changes the batch of a recipe; that of"),
        (["compare", "cpu", "--job_dir=x", "--on=vertex"], "--job_dir is not for a comparison: --out names the folder"),
    ],
)
def test_flags_that_do_not_fit_a_script_are_refused(
    arguments: list[str], line: str, project: Path, refused: Command
) -> None:
    assert line in refused(*arguments, "--script=train.py", *WHERE, "--project=p")


def test_a_dry_run_says_what_goes_along_and_quotes_what_would_run(project: Path, capsys: Capture) -> None:
    words = ["--name", "two words", '"quoted"', "it's", "", "$(HOME)", "--", "--steps=3"]
    flags = ["--max_cost=20", "--spot", "--labels=team=vision", "--project=p", "--spec"]
    assert main(["submit", "l4x1-2workers", "--script=train.py", *WHERE, *flags, "--", *words]) == 0
    text, shown = capsys.readouterr()
    assert "runs python train.py --name 'two words' '\"quoted\"' 'it'\"'\"'s' '' '$(HOME)' -- --steps=3\n" in shown
    assert "ships work: 7 files, 0.0 MB; " in shown
    assert "runs in python:3.12-slim, with what requirements.txt names: --image=URI names another" in shown
    assert "warning: SPOT: the script is ended by SIGTERM and started again: only what it saved itself" in shown
    assert len(START.splitlines()) <= 10
    spec = yaml.safe_load(text)
    assert spec["scheduling"]["strategy"] == "SPOT"
    for pool in spec["workerPoolSpecs"]:
        task = pool["containerSpec"]
        assert (task["args"], task["command"][2], task["imageUri"]) == (words, START, "python:3.12-slim")
        variables = {each["name"]: each["value"] for each in task["env"]}
        start = json.loads(variables["TRAINER_START"])
        assert (start["gpus"], start["script"]["command"]) == (1, ["train.py"])
        assert start["code"][0].startswith("gs://my-bucket/packages/train-0-")
        assert "LD_LIBRARY_PATH" in variables


UNLIKE = """
workerPoolSpecs:
  - &chief
    machineSpec: {machineType: g2-standard-24, acceleratorType: NVIDIA_L4, acceleratorCount: 2}
    replicaCount: 1
    diskSpec: {bootDiskType: pd-ssd, bootDiskSizeGb: 100}
    pythonPackageSpec: {pythonModule: trainer.task}
  - {<<: *chief, machineSpec: {machineType: n1-standard-8}, replicaCount: 2}
  - {machineSpec: {machineType: n1-highcpu-16}, replicaCount: 3, containerSpec: {imageUri: gcr.io/x/reduction}}
  - {<<: *chief, machineSpec: {machineType: n1-standard-8}}
scheduling: {timeout: 3600s}
"""


def test_a_script_keeps_unlike_machines_a_reduction_server_and_an_evaluator(project: Path, capsys: Capture) -> None:
    """The trainer refuses them: "unlike workers" and "a parameter server" of wrong_inputs.py."""
    Path("unlike.yaml").write_text(UNLIKE)
    assert main(["submit", "unlike.yaml", "--script=train.py", *WHERE, "--project=p", "--spec"]) == 0
    text, shown = capsys.readouterr()
    tasks = [pool["containerSpec"] for pool in yaml.safe_load(text)["workerPoolSpecs"]]
    assert tasks.pop(2) == {"imageUri": "gcr.io/x/reduction"}
    starts = [json.loads(each["value"]) for task in tasks for each in task["env"] if each["name"] == "TRAINER_START"]
    assert [start["gpus"] for start in starts] == [2, 0, 0]
    assert starts[0]["script"]["about"]["cluster"] == {"workers": 3, "replicas": 6}
    usd = 1.15 * (2.00083 + 3 * 0.38 + 3 * 0.56679) + 7 * 100 * 0.17 / 730
    assert f"unlike: {usd:.2f} USD an hour" in shown
    assert torch_variables({"CLUSTER_SPEC": json.dumps({
        "cluster": {f"workerpool{place}": ["a:1"] for place in (0, 1, 3)}, "task": {"type": "workerpool3", "index": 0},
    })})["RANK"] == "2"  # fmt: skip


def test_a_link_to_a_script_ships_the_folder_that_was_named(project: Path, refused: Command) -> None:
    (project / "link.py").symlink_to(project / "nets" / "task.py")
    found = read_script("link.py", "", "", [])
    assert (found.folder, found.command) == (project, ("link.py",))
    (project / "nets" / "away.py").symlink_to(project / "train.py")
    assert "or it is a link out of its folder" in refused("submit", "cpu", "--script=nets/away.py", *WHERE, "--dry_run")


IMPORTS = """\
import os, helper, vertex_report
from nets.task import x
try:
    import torch
except ImportError:
    torch = None
def plot(): import matplotlib
if __name__ == "__main__":
    import keras
"""


@pytest.mark.parametrize(("listed", "flags", "line"), [
    ("", [], "script=train.py: python:3.12-slim has no keras (train.py, line 9), PIL (nets/task.py, line 1), and there "
     f"is no requirements.txt: write one beside the script with the lines pillow, {requirements(0)[0]}, or use "
     "--force"),
    ("", ["--force"], ""),
    ("Pillow>=10", [], ""),
    ("", ["--image=us-docker.pkg.dev/p/r/x:1"], ""),
])  # fmt: skip
def test_an_import_that_the_image_has_not_is_refused_before_it_is_paid_for(
    listed: str, flags: list[str], line: str, project: Path, capsys: Capture
) -> None:
    for name, text in {"train.py": IMPORTS, "nets/task.py": "import PIL.Image\nx = 1", "plot.py": "import seaborn",
                       "requirements.txt": listed}.items():  # fmt: skip
        (project / name).write_text(text)
        (project / name).unlink() if not text else None
    code = main(["submit", "cpu", "--script=train.py", *WHERE, "--project=p", "--dry_run", *flags])
    shown = capsys.readouterr()
    assert code == (2 if line.startswith("script=") else 0)
    assert line in shown.out + shown.err
    assert "seaborn" not in shown.out
