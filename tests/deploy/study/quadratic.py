"""A job without TensorFlow, as a tier's pythonModule: what it reports is a known function of its settings.

It keeps the contract of a job directory as the trainer does: it locks it, resumes from its checkpoint, saves its state
on SIGTERM (exit code 75) and writes result.json last. Its own settings are those of `build`.
"""

import dataclasses
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, Literal

from trainer.base.run_files.records import append_stats, drop_stats_after, write_json
from trainer.base.run_files.run_layout import RESULT, RUN_INFO
from trainer.base.settings.resolution import resolve
from trainer.base.storage import keep_others_out


def data(config: Any) -> Any:
    """Stands for the data, which this job does not read."""


def build(
    config: Any,
    dataset: Any,
    *,
    x: float = 9.0,
    rows: int = 5,
    kind: Literal["plain", "offset"] = "plain",
    fate: Literal["done", "refused", "failed", "killed", "mute"] = "done",
    pause: float = 0.0,
) -> Any:
    """Declares the settings."""


def loss(config: Any) -> float:
    """Returns the function whose minimum is known: x = 3, rows = 7, plain, seed 0."""
    offset = 1.0 if config.kind == "offset" else 0.0
    return float((config.x - 3) ** 2 + 0.1 * (config.rows - 7) ** 2 + offset + 0.01 * config.seed)


def main() -> int:
    """Runs `steps` steps, each of which takes `pause` seconds."""
    config: Any = resolve(sys.argv[1:]).config
    folder = Path(config.job_dir)
    folder.mkdir(parents=True, exist_ok=True)
    keep_others_out(folder, "job_dir", str(folder))
    with open(folder / "starts", "a", encoding="utf-8") as file:
        file.write(f"{sorted(os.sched_getaffinity(0))}\n")
    if config.fate == "refused":
        write_json(folder / RESULT, {"state": "failed", "error": "this data does not exist", "exit_code": 2})
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    write_json(folder / RUN_INFO, {"config": dataclasses.asdict(config)})
    (folder / "checkpoints").mkdir(exist_ok=True)
    checkpoint = folder / "checkpoints" / "step"
    first = int(checkpoint.read_text()) if checkpoint.exists() else 0
    drop_stats_after(folder, first)
    if config.fate == "killed" and first == 0:
        checkpoint.write_text("1")
        os.kill(os.getpid(), signal.SIGKILL)
    for step in range(first + 1, config.steps + 1):
        time.sleep(config.pause)
        value = loss(config) + (config.steps - step)
        if config.fate != "mute":
            append_stats(folder, {"kind": "report", "step": step, "losses": {"loss": value}, "metrics": {}})
        checkpoint.write_text(str(step))
        print(f"step {step} loss {value}", flush=True)
        if config.fate == "failed":
            write_json(folder / RESULT, {"state": "failed", "error": "the loss is NaN"})
            return 1
    write_json(folder / RESULT, {"state": "done", "wall_seconds": 60.0, "goodput": {"step": 45.0, "other": 15.0}})
    return 0


if __name__ == "__main__":
    sys.exit(main())
