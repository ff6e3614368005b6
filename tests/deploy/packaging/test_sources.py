"""What of a user's package goes along with a job, and what is refused: credentials, gigabytes, code
with errors."""

import os
import re
import subprocess
import tracemalloc
from importlib import metadata
from pathlib import Path

import pytest

from deploy.packaging.distributions import check_requirement, with_dependencies
from deploy.packaging.packages import user_package, write_copy
from tests.deploy.conftest import JOB, WHERE, Command, error_of
from tests.deploy.planted import write_files

KEY = "-----BEGIN PRIVATE KEY-----\nMIIEvg\n-----END PRIVATE KEY-----\n"


@pytest.fixture
def mine() -> Path:
    files = dict.fromkeys(("__init__.py", "gan.py", "data/table.json"), "")
    return write_files(files, Path("my_models").absolute())


@pytest.mark.parametrize("lines", [["a[x]", "a"], ["a", "a[x]"], ["a[x]; python_version > '3'"]])
def test_extras_count_wherever_they_are_required(
    lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = {"a": ["b; extra == 'x'", "c; extra == 'y'"], "b": ["a[z]"], "c": [], "d": []}
    monkeypatch.setattr(metadata, "requires", needs.get)
    assert with_dependencies([*lines, "d; python_version < '3'"]) == {"a", "b"}


def test_ignored_and_hidden_files_notebooks_and_links_that_leave_are_left_out(mine: Path) -> None:
    Path(".gitignore").write_text("*.ckpt\n")  # of the repository
    (mine / ".gcloudignore").write_text("#!include:.gitignore\nraw/\n*.pem\n!data/table.json\n")
    (mine / "raw").mkdir()
    Path("outside.py").write_text("")
    for name in ("a.ckpt", "raw/photo.png", "key.pem", "try.ipynb", ".env", "__pycache__"):
        (mine / name).write_text(KEY)
    (mine / "away.py").symlink_to("../outside.py")
    (mine / "all").symlink_to(mine.parent)
    (mine / "broken").symlink_to(mine / "nothing")
    (mine / "same.py").symlink_to(mine / "gan.py")
    os.mkfifo(mine / "pipe")
    subprocess.run("git init -q && git add -A", shell=True, check=True)
    package = user_package(str(mine))
    kept = {f"my_models/{name}" for name in ("__init__.py", "gan.py", "data/table.json", "same.py")}
    assert package.files.keys() == {"setup.py", *kept}
    assert package.about.startswith(
        "ships my_models: 4 files, 0.0 MB; 8 left out: my_models/a.ckpt, my_models/all/,"
    )


def test_a_large_package_is_refused_before_it_is_read(mine: Path) -> None:
    with open(mine / "weights.bin", "wb") as file:
        file.truncate(3 * 10**9)  # sparse
    tracemalloc.start()
    error = error_of(user_package, str(mine))
    assert "3,000.0 MB in 4 files, the largest my_models/weights.bin" in error
    assert "mb=3001" in error
    os.truncate(mine / "weights.bin", 12 * 10**6)
    write_copy(user_package(str(mine), 13), Path("copy"))
    assert Path("copy/my_models/weights.bin").stat().st_size == 12 * 10**6
    assert tracemalloc.get_traced_memory()[1] < 11e6  # it is streamed
    tracemalloc.stop()


def test_files_that_change_while_they_are_copied_are_noticed(mine: Path) -> None:
    built = user_package(str(mine))
    assert built.digest
    (mine / "gan.py").write_text("X = 1\n")
    assert "its files changed while they were copied" in error_of(write_copy, built, Path("copy"))


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("x = (\n", ", line 1: '(' was never closed"),
        ("\0", "cannot contain null bytes"),
        ("X = 1\ndef f(:", ", line 2: "),
    ],
)
def test_a_syntax_error_is_told_here(code: str, what: str, mine: Path) -> None:
    (mine / "gan.py").write_text(code)
    error = error_of(user_package, str(mine))
    assert re.match(rf"package: my_models/gan.py.*{re.escape(what)}.* not import it: fix", error)


@pytest.mark.parametrize(
    "requirement",
    [
        "tensorflow<2.20",
        "TensorFlow <= 2.19.1",
        "tensorflow-cpu~=2.10.0",
        "tensorflow[and-cuda]==2.19.*",
        "tensorflow>=2.22",
        "keras==3.16.*",
    ],
)
def test_a_requirement_that_the_trainer_does_not_take_is_refused(requirement: str) -> None:
    error = error_of(check_requirement, requirement)
    assert re.search(r"the trainer needs \w+>=[\d.]+,<[\d.]+: drop the line", error)


def test_other_requirements_are_taken() -> None:
    for requirement in (
        "keras>=3.13,<3.16",
        "tensorflow",
        "tensorflow~=2.10",
        "keras==3.*",
        "tensorflow-datasets==4.9",
        "tensorflow; python_version < '3.9'",
        "tensorflow @ https://example.com/tensorflow.whl",
    ):
        check_requirement(requirement)


def test_the_largest_size_is_a_flag(mine: Path, refused: Command, typed: Command) -> None:
    (mine / "weights.bin").write_bytes(bytes(2 * 10**6))
    command = ["submit", "cpu", *JOB, *WHERE, "--project=p", "--dry_run", f"--package={mine}"]
    assert "at most 1 MB" in refused(*command, "--max_package_mb=1")
    assert "ships my_models: 4 files" in typed(*command, "--max_package_mb=3")
