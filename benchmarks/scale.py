"""Measures time and memory far beyond today's jobs: `python -m benchmarks.scale`. docs/scaling.md
has what it found.

No TensorFlow runs. Workers are threads of one process with real sockets; runs are written, not
trained; rows are only ordered. Each part is a process of its own, so that its memory is its own.
"""

import contextlib
import io
import json
import multiprocessing
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np

from benchmarks.runner import counts, elapsed, make_parser, print_table, program, save
from deploy.platform.local import free_addresses
from deploy.report.html_page import write_report
from tests.deploy.planted import noisy, plant
from trainer.cluster import rendezvous
from trainer.cluster.cluster_spec import Cluster
from trainer.cluster.rendezvous import Peers, meet
from trainer.data.order import shuffled

# a few kilobytes, as a run's
RUNS = {"seed": 0, "settings": {f"setting_{number}": "value" for number in range(100)}}
# rows of a batch, and batches of a measurement
BATCH = 4096
BATCHES = 50
PARSER = make_parser(__doc__)
PARSER.add_argument("--workers", type=counts, default=[2, 16, 64, 256], help="of one job")
PARSER.add_argument(
    "--tiers", type=counts, default=[4, 16, 64], help="of a comparison with three repeats"
)
PARSER.add_argument(
    "--rows", type=counts, default=[1000, 10**6, 10**9, 10**12], help="of a data set"
)

Found = dict[str, float]


@contextlib.contextmanager
def met(workers: int) -> Iterator[tuple[list[Peers], list[str]]]:
    """Yields the workers of a job, the chief first, and a list that gets a line from each that
    leaves for a lost one.

    Where a worker would end its process, it only stops watching.
    """
    addresses = tuple(free_addresses(workers))
    lines = []
    found: list[Peers] = []

    def join(index: int) -> Peers:
        def on_loss(line: str, code: int) -> None:
            lines.append(line)
            found[index]._over.set()

        return meet(Cluster(addresses, index), RUNS, 600.0, on_loss)

    quiet = patch.multiple(rendezvous, log=Mock(), LEAVE_SECONDS=0.0)
    with quiet, patch.object(os, "_exit"), ThreadPoolExecutor(workers) as pool:
        found += pool.map(join, range(workers))
        yield found, lines
        for each in found:
            each._over.set()
        for each in found:
            each._close()


def meeting(workers: int) -> Found:
    """Measures how long workers take to meet, to leave at the end, and to leave once one of them is
    lost."""
    began = time.perf_counter()
    with met(workers) as (job, _), ThreadPoolExecutor(workers) as pool:
        together = time.perf_counter() - began
        ends = elapsed(lambda: list(pool.map(Peers.finish, job)))
    with met(workers) as (job, lines):
        lost = elapsed(lambda: _lose(job, lines))
    return {"s to meet": together, "s to end": ends, "s until all left": lost}


def _lose(job: list[Peers], lines: list[str]) -> None:
    """Closes the connections of the last worker, as its end does, and waits until all others have
    left."""
    job[-1]._over.set()
    while len(lines) < len(job) - 1:
        time.sleep(0.001)


def comparison(tiers: int) -> Found:
    """Measures the report of a comparison with three repeats of each tier, of 20 reports each."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        plant_comparison(Path(folder), tiers)
        seconds = elapsed(lambda: write_report([folder], folder))
        return {
            "s": seconds,
            "kB of report.html": (Path(folder) / "report.html").stat().st_size / 1000,
        }


def plant_comparison(folder: Path, tiers: int, repeats: int = 3) -> None:
    """Writes a finished comparison: families of 1, 2, 4 and 8 devices, each family faster and
    dearer than the last."""
    facts = []
    for number in range(tiers):
        family = number // 4
        devices = 2 ** (number % 4)
        name = f"tier-{number + 1}"
        seconds = 0.2 * 0.9**family / devices**0.8
        usd = 0.9 * 1.15**family * devices
        facts.append(
            {
                "name": name,
                "machine_type": f"machine-{family}",
                "accelerator_type": f"KIND_{family}",
                "accelerators": devices,
                "workers": 1,
                "price_per_hour": usd,
            }
        )
        names = [f"GPU:{index}" for index in range(devices)]
        for repeat in range(1, repeats + 1):
            plant(
                folder / name / f"repeat-{repeat}",
                noisy(seconds * (1 + 0.01 * repeat)),
                batch=840,
                devices=names,
            )
    asked = {
        "on": "vertex",
        "parallel": 1,
        "scaling": "strong",
        "repeats": repeats,
        "command": "",
        "flags": [],
    }
    (folder / "comparison.json").write_text(json.dumps({**asked, "tiers": facts}))


def order(rows: int) -> Found:
    """Measures the order of the rows of batches in the middle of an epoch."""
    first = rows // 2
    positions = [(first + BATCH * number + np.arange(BATCH)) % rows for number in range(BATCHES)]
    seconds = elapsed(lambda: [shuffled(each, rows, 0, "rows", 3) for each in positions])
    return {"s for 1,000,000 rows": seconds / (BATCH * BATCHES) * 1e6}


def _part(measure: Callable[[int], Found], size: int, answer: Any) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    found = measure(size)
    used = time.process_time() - began
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answer.send({**found, "CPU s": used, "MiB": (after - before) / 1024})


def alone(measure: Callable[[int], Found], size: int) -> Found:
    """Returns what a measurement finds in a process of its own, with the CPU time and the memory
    that it takes."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_part, args=(measure, size, theirs))
    process.start()
    theirs.close()
    try:
        found = ours.recv()
    finally:
        process.join()
    return found


@program
def main() -> None:
    """Prints a table for each part and saves the raw numbers."""
    options = PARSER.parse_args()
    found = {}
    parts = {"workers": meeting, "tiers": comparison, "rows": order}
    for name, measure in parts.items():
        found[name] = {size: alone(measure, size) for size in getattr(options, name)}
        columns = list(next(iter(found[name].values())))
        lines = [f"| {name} | {' | '.join(columns)} |", "|--:|" + "--:|" * len(columns)]
        lines += [
            f"| {size:,} | {' | '.join(f'{row[column]:,.3g}' for column in columns)} |"
            for size, row in found[name].items()
        ]
        print_table(name.capitalize(), lines)
    save("scale", **found)
