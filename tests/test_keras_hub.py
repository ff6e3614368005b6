"""Tests examples/keras_hub_lora.py in an environment of its own, as keras-hub is none of the
packages of `dev`."""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.docs.sources import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture
def python() -> Iterator[str]:
    """Yields a Python that has keras-hub, and this one's packages."""
    with TemporaryDirectory() as folder:  # of 300 MB, which pytest would keep
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        interpreter = str(Path(folder, "bin", "python"))
        (packages,) = Path(folder).glob("lib/*/site-packages")
        (packages / "parent.pth").write_text(
            f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
        )
        install = ["pip", "--python", interpreter, "install", "--quiet", "keras-hub"]
        subprocess.run([sys.executable, "-m", *install], check=True)
        yield interpreter


def test_lora_trains_few_weights_with_equal_numbers_and_is_saved_merged(
    python: str, tmp_path: Path
) -> None:
    quiet = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [python, "-m", "tests.lora_steps", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
