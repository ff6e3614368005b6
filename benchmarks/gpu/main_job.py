"""Runs the main job of the README and keeps its speed and its last picture."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu.execution import RESULT, Results, rehearsing, turn
from trainer.base.run_files.records import read_json
from trainer.base.run_files.run_layout import RESULT as RESULT_FILE

KEPT = ("state", "step", "seconds", "training_seconds", "images_per_second", "peak_device_memory_gib")


@turn(alone=False)
def main() -> None:
    """Keeps what result.json says, and main_job.png beside the results."""
    results, small = Results(), ["--steps=4", "--width=4", "--sample_every_steps=2"] if rehearsing() else []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "trainer.task", "--recipe=wgan_gp_digits", f"--job_dir={folder}", *small]
        subprocess.run(command, check=True)
        content, _ = read_json(Path(folder) / RESULT_FILE)
        picture = sorted((Path(folder) / "samples").glob("step-*.png"))[-1]
        if os.environ.get(RESULT):
            shutil.copyfile(picture, Path(os.environ[RESULT]).with_suffix(".png"))
        results.keep(**{name: content[name] for name in KEPT if name in content})


if __name__ == "__main__":
    main()
