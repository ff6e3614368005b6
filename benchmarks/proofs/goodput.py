"""Compares the seconds that a run counts by class with the time for which its machine was paid, measured outside.

`python -m benchmarks.proofs.goodput [--cases=20]`: each case is a training that is killed by SIGKILL up to twice and
started again, as Vertex AI restarts a worker in place; every second one has evaluation, every third slow batches,
every fourth a NaN after which it goes back to a checkpoint, every fifth a slow disk under its checkpoints.
Paid is from the first process's start to the last one's end. What no process can count is said apart: the start of the
first one's Python, and the exit of the last one, after it wrote result.json. Exits with 1 if the rest is above LARGEST.
"""

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

LARGEST, PAUSE_S, STEP_S, FLUSH_S = 0.01, 0.05, 0.02, 1.0
_FLUSH, _BATCHES = os.fsync, itertools.count()  # of this process
PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--cases", type=int, default=20, help="default: %(default)s")
PARSER.add_argument("--first", type=int, default=0, help="number of the first case (default: %(default)s)")
PARSER.add_argument("--steps", type=int, default=2000, help="of each case (default: %(default)s)")


def slow_data(config: Any) -> Any:
    """Returns examples that take a while to read, without work."""
    import numpy as np

    class Slow:
        def __len__(self) -> int:
            return 2_000

        def __getitem__(self, index: int) -> tuple[Any, Any]:
            time.sleep(PAUSE_S / 640)
            return np.full((8, 8, 1), index / 2_000, np.float32), np.int64(index % 10)

    return Slow()


def slow_disk(file: int) -> None:
    """Flushes a file slowly, if it is of a checkpoint."""
    if threading.current_thread().name == "checkpoint":
        time.sleep(FLUSH_S)
    _FLUSH(file)


def disturbances() -> list[Any]:
    """Returns callbacks that make steps slow and, by the case, write NaN into the model once, or have a slow disk."""
    import keras
    import numpy as np

    case = int(os.environ["GOODPUT_CASE"])
    vars(os)["fsync"] = slow_disk if case % 5 == 4 else _FLUSH

    class Disturbs(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            time.sleep(STEP_S)
            if case % 4 == 3 and next(_BATCHES) == 150:
                weights = self.model.trainable_variables[0]
                weights.assign(np.full(weights.shape, np.nan))

    return [Disturbs()]


def seconds_of(case: int, steps: int, folder: Path) -> tuple[float, float, dict[str, Any]]:
    """Runs a case; returns the seconds that were paid for, those before and after all counting, and result.json."""
    chance = random.Random(case)
    flags = ["--model=mlp", "--data=digits", f"--steps={steps}", "--report_every_steps=20", f"--job_dir={folder}",
             "--checkpoint_every_steps=100", "--on_nan=rollback",
             "--callbacks=benchmarks.proofs.goodput:disturbances"]  # fmt: skip
    flags += ["--evaluation_fraction=0.2"] if case % 2 else []
    flags += ["--data=benchmarks.proofs.goodput:slow_data"] if case % 3 == 2 else []
    environment = {**os.environ, "CLOUD_ML_JOB_ID": f"case-{case}", "GOODPUT_CASE": str(case)}
    kills = [chance.uniform(6.0, 25.0) for _ in range(case % 3)]
    began = time.time()
    for seconds in (*kills, None):
        process = subprocess.Popen([sys.executable, "-m", "trainer.task", *flags], env=environment,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            time.sleep(1.0)  # a container takes a moment to start
    ended, result = time.time(), json.loads((folder / "result.json").read_text())
    return ended - began, ended - result["written_at"], result


def main() -> int:
    """Runs the cases; returns 1 if one differs by more than LARGEST."""
    args = PARSER.parse_args()
    worst = 0.0
    for case in range(args.first, args.first + args.cases):
        with tempfile.TemporaryDirectory() as folder:
            paid, leaving, result = seconds_of(case, args.steps, Path(folder) / "run")
        counted = sum(result["goodput"].values())
        off_by = (counted + leaving) / paid - 1
        worst = max(worst, abs(off_by))
        off = f"counted {counted:.1f} s and {leaving:.1f} s of its exit ({100 * off_by:+.2f} %)"
        restarts = f"{result['restarts']} restarts, {result['rollbacks']} rollbacks"
        print(f"case {case}: {result['state']}, paid {paid:.1f} s, {off}, {restarts}: {result['goodput']}", flush=True)
    print(f"largest difference: {100 * worst:.2f} %")
    return int(worst > LARGEST)


if __name__ == "__main__":
    sys.exit(main())
