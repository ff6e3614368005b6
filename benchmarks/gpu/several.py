"""Measures 1, 2, 4 and 8 GPUs of this machine on the same global batch, each number in a process of its own."""

import json
import statistics
import subprocess
import sys
from typing import Any

import tensorflow as tf

from benchmarks.gpu.execution import Results, rehearsing
from benchmarks.gpu.memory import flags_of
from benchmarks.runner import count, make_parser

NETWORKS = ("resnet50", "wgan_gp-32", "cnn")
PARSER = make_parser(__doc__, repeats=5, seconds=1.0)
PARSER.add_argument("--case", choices=NETWORKS)
PARSER.add_argument("--replicas", type=count, default=1)


def main() -> None:
    """Keeps steps a second by network and number of GPUs, and the losses of the first ten steps."""
    options = PARSER.parse_args()
    if options.case:
        print(json.dumps(measured(options.case, options.replicas, options.seconds, options.repeats)))
        return
    gpus, results, lines = len(tf.config.list_physical_devices("GPU")), Results(), dict[str, Any]()
    for case in NETWORKS:
        for replicas in (1, 2, 4, 8):
            if replicas <= gpus or (rehearsing() and replicas <= 2):
                command = [sys.executable, "-m", "benchmarks.gpu.several", f"--case={case}", f"--replicas={replicas}"]
                short = ["--seconds=0.05", "--repeats=2"] if rehearsing() else []
                done = subprocess.run([*command, *short], capture_output=True, text=True, check=False)
                last = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines() or ["no reason"]
                lines[f"{case} on {replicas}"] = json.loads(last[-1]) if done.returncode == 0 else last[-1][:200]
                results.keep(networks=lines)


def measured(case: str, replicas: int, seconds: float, repeats: int) -> dict[str, Any]:
    """Returns the median steps a second on so many devices, the losses of ten steps, and the way of summing."""
    from benchmarks.trainer_loop import TrainingLoop, setup_of

    flags = [flag for flag in flags_of(case) if not flag.startswith("--replicas")]
    setup = setup_of(*flags, f"--replicas={replicas}")
    runner = setup.step_runner()
    losses = runner(setup.rows_from(0), 0, 10).means()
    loop = TrainingLoop(setup, runner)
    steps = max(1, round(seconds / max(loop(3) / 3, 1e-6)))
    speeds = [steps / loop(steps) for _ in range(repeats)]
    return {"steps_per_second": statistics.median(speeds), "losses": losses, "sums": setup.replicas.collectives}


if __name__ == "__main__":
    main()
