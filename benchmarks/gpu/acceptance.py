"""Runs `trainer.check --on_gpus` with the main recipe and a classifier: `python -m benchmarks.gpu.acceptance`."""

import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu.execution import Results, rehearsing, turn
from trainer.base.run_files.records import read_json
from trainer.base.run_files.run_layout import GPU_CHECK

RECIPES = {"wgan_gp_digits": ["--critic_steps=2"], "cnn_mnist": ["--data=digits", "--image_size=24"]}
SMALL = ["--seconds=0", "--width=4", "--global_batch_size=8"]


@turn(alone=False)
def main() -> int:
    """Keeps the lines of each check's table; returns 1 if one does not agree."""
    results, code = Results(), 0
    for recipe, flags in RECIPES.items():
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "trainer.check", "--on_gpus", f"--recipe={recipe}", *flags]
            command += [f"--job_dir={folder}", *(SMALL if rehearsing() else ["--seconds=1"])]
            done = subprocess.run(command, check=False)
            content, problem = read_json(Path(folder) / GPU_CHECK)
        code = code or done.returncode
        results.keep(**{recipe: content or {"problem": problem}})
    return code


if __name__ == "__main__":
    sys.exit(main())
