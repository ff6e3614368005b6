"""The quick tests on the oldest Python and TensorFlow that we promise: Python 3.10 with TensorFlow 2.17.

Prints a line and ends well where no Python 3.10 is found. `make test-floor` runs it.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
VENV = ROOT / ".venv-floor"
TENSORFLOW = "tensorflow==2.17.*"


def find_python() -> str | None:
    """A Python 3.10 that runs: on the PATH, named by PYTHON310, or one of pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    named = [os.environ.get("PYTHON310"), shutil.which("python3.10"), *sorted(pyenv.glob("3.10.*/bin/python"))]
    for candidate in filter(None, named):
        asked = subprocess.run(
            [candidate, "-c", "import ensurepip, sys; print(sys.version_info[:2])"], capture_output=True
        )
        if asked.stdout.strip() == b"(3, 10)":
            return str(candidate)
    return None


def install(python: str) -> str:
    """A virtual environment with this package on the floor; its interpreter."""
    interpreter = VENV / "bin" / "python"
    stamp, sources = VENV / ".installed", ROOT / "setup.py"
    if not stamp.exists() or stamp.stat().st_mtime < sources.stat().st_mtime:
        subprocess.run([python, "-m", "venv", str(VENV)], check=True)
        packages = [TENSORFLOW, "--editable", ".[test]"]
        pinned = ["--require-hashes", "--no-deps", "--requirement", "tests/requirements-gcs.txt"]
        for what in (packages, pinned):
            subprocess.run([str(interpreter), "-m", "pip", "install", "--quiet", *what], cwd=ROOT, check=True)
        stamp.touch()
    return str(interpreter)


def main() -> int:
    """Runs the tests there; their exit code."""
    python = find_python()
    if python is None:
        print("test-floor: skipped: no Python 3.10 here (name one with PYTHON310=/path/to/python3.10)")
        return 0
    interpreter = install(python)
    subprocess.run([interpreter, "-m", "pip", "check"], check=True)
    return subprocess.run([interpreter, "-m", "pytest", "-q", "-m", "not slow", *sys.argv[1:]], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
