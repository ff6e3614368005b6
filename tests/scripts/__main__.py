"""Runs scripts of this folder one after another in one process: `python -m tests.scripts REPLICAS
NAME…`; 0 replicas: as plain python does.

On several replicas each script is interrupted once, and the same command again resumes it."""

import os
import runpy
import sys
from pathlib import Path

from trainer.base.errors import DONE, INTERRUPTED
from trainer.launch import main

replicas, *names = sys.argv[1:]
mark = ["sent"] if int(replicas) > 1 else []
top = Path.cwd()
end = DONE
for name in names:
    sys.modules.pop("tests.scripts.shared", None)  # which seeds
    folder = top / name
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    script = str(Path(__file__).with_name(f"{name}.py"))
    if int(replicas):
        code = main(["--job_dir=run", f"--replicas={replicas}", script, "found.json", *mark])
        if code not in (DONE, INTERRUPTED):
            sys.exit(code)
        end = max(end, code)
    else:
        sys.argv = [script, "found.json"]
        runpy.run_path(script, run_name="__main__")
sys.exit(end)
