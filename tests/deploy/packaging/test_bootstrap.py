"""Tests the start command of a plain Python image, as the spec holds it, in a clean environment
without our source."""

import hashlib
import json
import os
import re
import subprocess
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.__main__ import main
from deploy.packaging.image_choice import BOOTSTRAP
from tests.deploy.conftest import JOB, WHERE, Capture, run, task_of
from tests.deploy.emulator import Emulator, Fault
from tests.fixtures import Patch

ADDRESS = "my-bucket/packages/hello/hello-1-py3-none-any.whl"
FILES = {
    "hello.py": "import sys\nprint('hello', *sys.argv[1:])\n",
    "hello-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: hello\nVersion: 1\n",
    "hello-1.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "hello-1.dist-info/RECORD": "",
}


@pytest.fixture
def wheel(cloud: Emulator, tmp_path: Path) -> str:
    """Stores a small wheel in the bucket and returns its SHA-256."""
    with zipfile.ZipFile(tmp_path / "hello.whl", "w") as archive:
        for name, text in FILES.items():
            archive.writestr(name, text)
    content = (tmp_path / "hello.whl").read_bytes()
    cloud.objects[ADDRESS] = content
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def start(bare: Path, cloud: Emulator, capsys: Capture, monkeypatch: Patch) -> Any:
    """Returns a function that runs the start command with a plan, and returns it with its log."""
    monkeypatch.setattr("deploy.api.submit.packages_with", lambda *_, **__: [])
    assert main(["submit", "--spec", "cpu", *WHERE, *JOB, "--project=p"]) == 0
    task = task_of(yaml.safe_load(capsys.readouterr().out))
    _, *code = task["command"]
    cloud.objects[code[2].removeprefix("gs://")] = BOOTSTRAP.build().read_bytes()
    code[1] = code[1].replace("(2, 4, 8, 16, 0)", "(0.1, 0)")

    def started(
        digest: str, gpus: int = 0, requirements: Sequence[str] = ("--no-index",), **more: str
    ) -> tuple[subprocess.CompletedProcess[str], list[dict[str, str]]]:
        plan = {"gpus": gpus, "requirements": [*requirements], "module": "hello"}
        plan["packages"] = [[f"gs://{ADDRESS}", digest]]
        variables = {name: os.environ[name] for name in ("PATH", "STORAGE_EMULATOR_HOST")}
        variables["TRAINER_START"] = json.dumps(plan)
        variables["GCE_METADATA_HOST"] = cloud.url.removeprefix("http://")
        done = run([str(bare), *code, *task["args"]], env={**variables, **more})
        return done, [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    return started


@pytest.mark.slow
@pytest.mark.parametrize(
    ("requirements", "installer"),
    [
        ([], "by uv"),
        (["--no-deps"], "installs --no-deps hello-1-py3-none-any.whl by uv"),
        (["--no-index"], "by pip: --no-index in the requirements"),
        (["-r", "requirements.txt"], "by pip: -f in the requirements"),
        (["--frozen"], "uv failed, and pip installs: error: unexpected argument '--frozen' found"),
    ],
)
def test_a_wheel_of_the_bucket_is_installed_and_run(
    requirements: list[str], installer: str, bare: Path, start: Any, wheel: str, cloud: Emulator
) -> None:
    """The job's account reads it, with a token of the metadata server. Without pip's settings uv
    installs it."""
    Path("requirements.txt").write_text("-f .\n")
    assert run([str(bare), "-m", "ensurepip"]).returncode == 0
    assert run([str(bare), "-m", "pip", "install", "--quiet", "uv"]).returncode == 0
    cloud.accounts = {}
    cloud.faults = [Fault("GET /storage.*bootstrap", 503), Fault("GET /storage.*hello", 503)]
    done, log = start(wheel, requirements=requirements, PIP_CONFIG_FILE=os.devnull)
    lines = [entry["message"] for entry in log]
    assert any(installer in line for line in lines), lines
    if "--frozen" in requirements:  # which pip does not know either
        assert done.returncode == 1
        assert "error: pip install failed: " in lines[-1]
        return
    assert done.returncode == 0
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] == f"hello {' '.join([*JOB, '--expect_devices=0'])}"
    assert [line.split()[0] for line in lines] == ["installs", "installed"]


@pytest.mark.parametrize(
    ("digest", "gpus", "status", "line"),
    [
        ("0" * 64, 0, 0, f"error: gs://{ADDRESS}: its SHA-256 is {{wheel}}, not 000"),
        ("", 0, 403, f"error: gs://{ADDRESS}: status 403: the job's account must be able to"),
        ("", 1, 0, "error: libcuda.so.1, NVIDIA's driver, is neither in LD_LIBRARY_PATH"),
    ],
)
def test_what_cannot_work_ends_with_one_line_before_anything_is_installed(
    digest: str, gpus: int, status: int, line: str, start: Any, wheel: str, cloud: Emulator
) -> None:
    cloud.faults = [Fault("GET /storage.*hello", status)] if status else []
    done, log = start(digest or wheel, gpus, LD_LIBRARY_PATH="/usr/local/nvidia/lib64")
    (entry,) = log
    assert done.returncode == 2
    assert entry["severity"] == "ERROR"
    assert entry["message"].startswith(line.format(wheel=wheel))
    assert not [request for request in cloud.requests if gpus and "hello" in request]


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (None, "HTTP Error 404: Not Found: may the job's account read it?"),
        (b"print('another')", "bootstrap.py: its SHA-256 has changed"),
    ],
)
def test_without_its_bootstrap_a_job_ends_with_one_line(
    content: bytes | None, line: str, start: Any, wheel: str, cloud: Emulator
) -> None:
    (name,) = [name for name in cloud.objects if name.endswith("bootstrap.py")]
    del cloud.objects[name]
    cloud.objects |= {name: content} if content else {}
    done, _ = start(wheel)
    assert done.returncode == 1
    assert done.stdout == ""
    assert re.fullmatch(f"error: .*{re.escape(line)}\n", done.stderr)
