"""Runs scripts of this folder one after another in one process: `python -m tests.scripts REPLICAS
NAME…`; 0 replicas: as plain python does."""

import os
import runpy
import sys
from pathlib import Path

from trainer.launch import main

replicas, *names = sys.argv[1:]
top = Path.cwd()
for name in names:
    sys.modules.pop("tests.scripts.shared", None)  # which seeds
    folder = top / name
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    script = str(Path(__file__).with_name(f"{name}.py"))
    if int(replicas):
        code = main(["--job_dir=run", f"--replicas={replicas}", script, "found.json"])
        if code:
            sys.exit(code)
    else:
        sys.argv = [script, "found.json"]
        runpy.run_path(script, run_name="__main__")
