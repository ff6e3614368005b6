"""What of a user's package goes along with a job, and what is refused: credentials, gigabytes, code
with errors."""

import os
import re
import subprocess
import tracemalloc
from pathlib import Path

import pytest

from deploy.__main__ import main
from deploy.packaging.distributions import check_requirement
from deploy.packaging.packages import user_package, write_copy
from tests.deploy.conftest import WHERE, Capture, Command, error_of
from trainer.base.errors import UserError

KEY = "-----BEGIN PRIVATE KEY-----\nMIIEvg\n-----END PRIVATE KEY-----\n"


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    folder = tmp_path / "my_models"
    (folder / "data").mkdir(parents=True)
    for name in ("__init__.py", "gan.py", "data/table.json"):
        (folder / name).write_text("")
    return folder


def test_ignored_and_hidden_files_notebooks_and_links_that_leave_are_left_out(
    mine: Path, tmp_path: Path
) -> None:
    (tmp_path / ".gitignore").write_text("*.ckpt\n")  # of the repository
    (mine / ".gcloudignore").write_text("#!include:.gitignore\nraw/\n*.pem\n!data/table.json\n")
    (mine / "raw").mkdir()
    (tmp_path / "outside.py").write_text("")
    for name in ("a.ckpt", "raw/photo.png", "key.pem", "try.ipynb", ".env", "__pycache__"):
        (mine / name).write_text(KEY)
    (mine / "away.py").symlink_to(tmp_path / "outside.py")
    (mine / "all").symlink_to(tmp_path)
    (mine / "broken").symlink_to(mine / "nothing")
    (mine / "same.py").symlink_to(mine / "gan.py")
    os.mkfifo(mine / "pipe")
    for command in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    package = user_package(str(mine))
    assert {name.removeprefix("my_models/") for name in package.files} == {
        "setup.py",
        "__init__.py",
        "gan.py",
        "data/table.json",
        "same.py",
    }
    assert package.about.startswith(
        "ships my_models: 4 files, 0.0 MB; 8 left out: my_models/a.ckpt, my_models/all/,"
        " my_models/aw"
    )


def test_a_large_package_is_refused_before_it_is_read(mine: Path, tmp_path: Path) -> None:
    with open(mine / "weights.bin", "wb") as file:
        file.truncate(3 * 10**9)  # sparse
    tracemalloc.start()
    with pytest.raises(
        UserError, match=r"3,000.0 MB in 4 files, the largest my_models/weights.bin .*mb=3001"
    ):
        user_package(str(mine))
    os.truncate(mine / "weights.bin", 12 * 10**6)
    write_copy(user_package(str(mine), 13), tmp_path / "copy")
    assert (tmp_path / "copy" / "my_models" / "weights.bin").stat().st_size == 12 * 10**6
    assert tracemalloc.get_traced_memory()[1] < 11e6  # it is streamed
    tracemalloc.stop()


def test_files_that_change_while_they_are_copied_are_noticed(mine: Path, tmp_path: Path) -> None:
    built = user_package(str(mine))
    assert built.digest
    (mine / "gan.py").write_text("X = 1\n")
    assert "its files changed while they were copied" in error_of(
        write_copy, built, tmp_path / "copy"
    )


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
    with pytest.raises(
        UserError, match=rf"^package: my_models/gan.py.*{re.escape(what)}.* not import it: fix it$"
    ):
        user_package(str(mine))


@pytest.mark.parametrize(
    ("requirement", "refused"),
    [
        ("tensorflow==2", True),
        ("tensorflow<2.20", True),
        ("TensorFlow <= 2.19.1", True),
        ("tensorflow-cpu~=2.10.0", True),
        ("tensorflow[and-cuda]==2.19.*", True),
        ("keras<3", True),
        ("tensorflow>=2.22", True),
        ("keras>=2,<3.15", True),
        ("keras==3.16.*", True),
        ("keras>=3.13,<3.16", False),
        ("tensorflow", False),
        ("tensorflow==2.20.0", False),
        ("tensorflow~=2.10", False),
        ("keras==3.*", False),
        ("tensorflow-datasets==4.9", False),
        ("tensorflow; python_version < '3.9'", False),
        ("tensorflow>2.20,<2.22", False),
        ("tensorflow @ https://example.com/tensorflow.whl", False),
    ],
)
def test_a_requirement_that_the_trainer_does_not_take_is_refused(
    requirement: str, refused: bool
) -> None:
    if not refused:
        check_requirement(requirement)
        return
    with pytest.raises(UserError, match=r"the trainer needs \w+>=[\d.]+,<[\d.]+: drop the line"):
        check_requirement(requirement)


def test_the_largest_size_is_a_flag_and_a_package_that_is_ignored_whole_is_refused(
    mine: Path, capsys: Capture, refused: Command
) -> None:
    (mine / "weights.bin").write_bytes(bytes(2 * 10**6))
    flags = [
        "submit",
        "cpu",
        "--model=mlp",
        *WHERE,
        "--project=p",
        "--dry_run",
        f"--package={mine}",
    ]
    assert "at most 1 MB" in refused(*flags, "--max_package_mb=1")
    assert main([*flags, "--max_package_mb=3"]) == 0
    assert "ships my_models: 4 files" in capsys.readouterr().out
    (mine / ".gitignore").write_text("*\n")
    assert "ignores its __init__.py: nothing would go along" in refused(*flags)
