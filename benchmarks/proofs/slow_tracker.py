"""Compares steps beside an MLflow server that takes 30 s for each answer with steps beside none, in turn.

`python -m benchmarks.proofs.slow_tracker [--pairs=10]`: one process, one training; each block reports every 50 ms, as a
run of short steps does. Needs mlflow-skinny. Prints the ratio of each pair, their mean and its 95 % interval.
"""

import argparse
import dataclasses
import statistics
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from benchmarks.trainer_loop import TrainingLoop, setup_of
from trainer.base.errors import UserError
from trainer.base.run_files.records import append_stats, write_json
from trainer.base.run_files.tracking.sender import Sender
from trainer.base.run_files.tracking.tracked_files import RunFiles
from trainer.base.tracker import read_addresses

ANSWER_S, BLOCK_S, STUDENT = 30.0, 4.0, 2.262  # the last: t of 97.5 % with 9 degrees of freedom
PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--pairs", type=int, default=10, help="default: %(default)s")


class Slow(BaseHTTPRequestHandler):
    """Answers late, and that it is busy, so that a client asks again and again."""

    def do_GET(self) -> None:
        """Answers any request so."""
        time.sleep(ANSWER_S)
        self.send_error(503)

    do_POST = do_GET

    def log_message(self, *_: Any) -> None:
        """Prints nothing."""


def block(loop: TrainingLoop, steps: int, folder: Path) -> tuple[float, float]:
    """Trains for some seconds, with a line of stats.jsonl after each call to the device.

    Returns seconds and seconds of the process's CPU, a step: where others use the machine the latter tells more.
    """
    seconds, done, began, cpu = 0.0, 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - began < BLOCK_S:
        seconds += loop(steps)
        done += steps
        append_stats(folder, {"kind": "report", "step": loop.step, "losses": {"loss": 1.0}, "time": time.time()})
    return seconds / done, (time.process_time() - cpu) / done


def end(sender: Sender) -> None:
    """Makes the sender's next try its last."""

    def refuse(**_: Any) -> None:
        raise UserError("over")

    sender.send = refuse  # type: ignore[method-assign]


def main() -> int:
    """Prints the ratios; returns 0."""
    pairs = PARSER.parse_args().pairs
    server = ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    [address] = read_addresses(f"mlflow:http://127.0.0.1:{server.server_port}#slow")
    loop, ratios = TrainingLoop(setup_of("--model=cnn", "--data=digits", "--global_batch_size=32")), []
    steps = loop.steps_in(0.05)
    with tempfile.TemporaryDirectory() as scratch:
        write_json(Path(scratch) / "run.json", {"config": {}, "id": "slow"})
        block(loop, steps, Path(scratch))  # warms up
        for pair in range(pairs):
            found = {}
            for tracked in (True, False) if pair % 2 else (False, True):
                if tracked:
                    sender = Sender(dataclasses.replace(address), RunFiles(Path(scratch), scratch))
                    sender.start()
                found[tracked] = block(loop, steps, Path(scratch))
                if tracked:
                    end(sender)
            ratios.append([tracked / alone for tracked, alone in zip(found[True], found[False], strict=True)])
            print(
                f"pair {pair + 1}: {1e3 * found[True][0]:.2f} ms tracked, {1e3 * found[False][0]:.2f} alone", flush=True
            )
    for kind, values in zip(("step time", "CPU time of a step"), zip(*ratios, strict=True), strict=True):
        half, mean = STUDENT * statistics.stdev(values) / len(values) ** 0.5, statistics.fmean(values)
        middle = statistics.median(values)
        print(f"{kind}, tracked / alone: {mean:.4f} ({mean - half:.4f} to {mean + half:.4f}), median {middle:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
