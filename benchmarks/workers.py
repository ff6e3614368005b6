"""Two workers of one core each, against two processes that do the same work without talking, and PyTorch's DDP:
`python -m benchmarks.workers`.

Every contender is a pair of processes that waits for its turn; a turn is the same number of steps on both.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from benchmarks.measure import alternate, keep, table
from deploy.rehearsal import free_addresses

SIZE, WIDTH = 32, 32
CONTENDERS = {
    "2 workers": ["ours", "--sync_batch_norm=false"],
    "2 silent processes": ["silent"],
    "2 workers, batch norm synchronised": ["ours"],
    "PyTorch DDP (gloo)": ["ddp"],
    "2 silent PyTorch processes": ["ddp-silent"],
}


class Pair:
    """Two processes of one contender, each pinned to a core of its own."""

    def __init__(self, arguments: Sequence[str], batch: int) -> None:
        addresses, cores = free_addresses(2), sorted(os.sched_getaffinity(0))
        self._batch, self._steps = batch, 2
        self._processes = []
        for place in range(2):
            config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": place}}
            environment = {**os.environ, "TF_CONFIG": json.dumps(config), "TF_CPP_MIN_LOG_LEVEL": "3"}
            command = [sys.executable, "-m", "benchmarks.worker", arguments[0], str(batch), *arguments[1:]]
            process = subprocess.Popen(
                command, env={**environment, "OMP_NUM_THREADS": "1"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, text=True,
            )  # fmt: skip
            os.sched_setaffinity(process.pid, {cores[place % len(cores)]})
            self._processes.append(process)
        self._turn(2)

    def fit(self, seconds: float) -> None:
        """Chooses the steps of a turn that last about so long."""
        self._steps = max(2, round(self._steps * seconds / self._turn(self._steps)))

    def __call__(self) -> float:
        """images/s of real images, over both processes."""
        return self._steps * 5 * self._batch / self._turn(self._steps)

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
            process.kill()
            process.wait()

    def _turn(self, steps: int) -> float:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{steps}\n")
            process.stdin.flush()
        seconds = []
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, "a process of this contender has ended"
            seconds.append(float(line))
        return max(seconds)


def measure(batch: int, names: Sequence[str], repeats: int, seconds: float) -> dict[str, list[float]]:
    """images/s of every contender, `repeats` times in turn."""
    pairs = {name: Pair(CONTENDERS[name], batch) for name in names}
    try:
        for pair in pairs.values():
            pair.fit(seconds)
        turns: dict[str, Callable[[], float]] = dict(pairs)
        return alternate(turns, repeats)
    finally:
        for pair in pairs.values():
            pair.close()


def main() -> None:
    """Prints the tables and keeps the raw numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", default="64,256", help="global batch sizes")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    try:
        import torch  # noqa: F401

        names = list(CONTENDERS)
    except ImportError:
        names = [name for name in CONTENDERS if "PyTorch" not in name]
        print("PyTorch is not installed: left out")
    raw, began = {}, time.monotonic()
    for batch in options.batches.split(","):
        found = measure(int(batch), names, options.repeats, options.seconds)
        raw[f"batch {batch}"] = found
        silent = statistics.median(a / b for a, b in zip(found["2 workers"], found["2 silent processes"], strict=True))
        print("\n".join([f"\nwgan_gp {SIZE}x{SIZE}, global batch {batch}", "", *table(found, "2 workers", "images/s")]))
        print(f"{silent:.2f} of the limit", flush=True)
    keep("workers", {"images_per_second": raw, "seconds": round(time.monotonic() - began)})


if __name__ == "__main__":
    main()
