"""Finds the commit that changed the numbers of a golden file: drives `git bisect run` in the current repository."""

import subprocess
import sys
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory

from trainer.base.errors import DONE, UserError
from trainer.base.log import log
from trainer.proofs.golden_file import read_golden

# What `git bisect run` takes: 0 is good, 125 cannot be tested, every other code below 128 is bad.
_SCRIPT = """\
import subprocess, sys
code = subprocess.run([sys.executable, "-m", "trainer.golden", "check", sys.argv[1]]).returncode
sys.exit({0: 0, 2: 1}.get(code, 125))
"""


def bisect(file: Path, good: str, bad: str) -> int:
    """Logs the first commit between `good` and `bad` with other numbers. Raises UserError where git refuses."""
    read_golden(file)
    if _git("status", "--porcelain", "--untracked-files=no"):
        raise UserError("the working tree has changes, which git bisect would overwrite: commit or stash them")
    with TemporaryDirectory(prefix="trainer-bisect-") as folder:
        golden = copyfile(file, Path(folder) / file.name)  # other commits have other golden files
        _git("bisect", "start", bad, good)
        try:
            lines = _git("bisect", "run", sys.executable, "-c", _SCRIPT, str(golden)).splitlines()
        finally:
            _git("bisect", "reset")
    first = next((line.split()[0] for line in lines if line.endswith("is the first bad commit")), "")
    if not first:
        raise UserError(f"git bisect found no commit: {lines[-1] if lines else 'it printed nothing'}")
    log.info(f"{file.stem}   {_git('log', '-1', '--format=%h %s', first)}: is the first with other numbers")
    return DONE


def _git(*words: str) -> str:
    process = subprocess.run(["git", *words], capture_output=True, text=True, check=False)
    if process.returncode:
        lines = (process.stderr or process.stdout).strip().splitlines()
        raise UserError(f"git {' '.join(words[:2])}: {lines[-1] if lines else 'it failed'}")
    return process.stdout.strip()
