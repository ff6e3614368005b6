"""Tries an audit on forged runs: `python -m benchmarks.proofs.forged_chains [--draws=40]`.

A small run, killed by SIGKILL and resumed, is audited first: each stretch must give equal bits. Then each draw forges a
copy of its chain of checkpoints at a random place, with all digests made anew, so that only training again can tell: a
checkpoint is replaced, one bit of it is flipped, or a stretch is trained on other data and the run goes on from there.
An audit of --segments random stretches must find it exactly where it has drawn a forged stretch. A manifest that names
another forerunner is always found. The shares are set beside the promised ones, and those of --seeds draws of stretches
alone, without training.
"""

import io
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.runner import count, make_parser, program
from trainer import audit
from trainer.base.errors import DONE, USER_MUST_CHANGE
from trainer.base.run_files.run_layout import CHECKPOINTS, step_name
from trainer.proofs.auditing import Reexecution
from trainer.proofs.stretches import Stretch, chosen
from trainer.run.requested_run import NEWEST, read_request
from trainer.training.checkpoint import read_checkpoint, write_checkpoint
from trainer.training.state import WEIGHTS

SOURCE = """
import keras
import numpy as np


def data(config):
    with np.load("rows.npz") as rows:
        return rows["x"], rows["y"]


def model(config, dataset):
    network = keras.Sequential([
        keras.layers.Dense(8, "relu"), keras.layers.BatchNormalization(), keras.layers.Dropout(0.2),
        keras.layers.Dense(1),
    ])
    network.compile(keras.optimizers.Adam(config.learning_rate), loss="mse")
    return network
"""
EVERY, STRETCHES = 3, 10
FLAGS = [
    "--model=mine:model", "--data=mine:data", f"--steps={EVERY * STRETCHES}", f"--checkpoint_every_steps={EVERY}",
    "--keep_checkpoints=all", "--global_batch_size=16", "--learning_rate=0.01", "--job_dir=honest",
    "--steps_per_loop=1", "--tensorboard=false", "--jit_compile=false",
]  # fmt: skip
STEPS = [EVERY * number for number in range(STRETCHES + 1)]  # of the checkpoints; 0 has none
Values = Mapping[str, npt.NDArray[Any]]
PARSER = make_parser(__doc__)
PARSER.add_argument("--draws", type=count, default=40)
PARSER.add_argument("--segments", type=count, default=3)
PARSER.add_argument("--seeds", type=count, default=20_000)


def write_rows(poisoned: bool) -> None:
    """Writes the data; poisoned: a tenth of the targets are others."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(256, 6)).astype("float32")
    y = x.sum(axis=1)
    y[:25] += 3 * poisoned
    np.savez("rows.npz", x=x, y=y)


def trained() -> Path:
    """Trains the honest run, killed once in between; returns its job directory."""
    job = [sys.executable, "-m", "trainer.task", *FLAGS]
    middle = Path("honest", CHECKPOINTS, step_name(STEPS[STRETCHES // 2]))
    with subprocess.Popen(job, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as first:
        while first.poll() is None and not middle.exists():
            time.sleep(0.002)
        first.kill()
    subprocess.run(job, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    print("killed and resumed" if first.returncode == -signal.SIGKILL else "it ended before it was killed")
    return Path("honest")


def reexecution() -> Reexecution:
    """Returns what trains stretches on the data that are there now."""
    request = read_request(audit.parser_of_audit(), ["honest", "--seed=0", f"--checkpoint={NEWEST}"])
    return Reexecution(request)


def rewrite(job: Path, step: int, values: Values, previous: Mapping[str, Any] | None) -> dict[str, Any]:
    """Replaces the checkpoint of a step, with what it follows; returns its link."""
    folder = job / CHECKPOINTS / step_name(step)
    manifest, _ = read_checkpoint(folder)
    shutil.rmtree(folder)
    return write_checkpoint(folder, values, {**manifest, "files": {}, "previous": previous})


def linked_anew(job: Path, forged: Mapping[int, Values]) -> None:
    """Writes these checkpoints in place of those of the run, and the links of all."""
    link = None
    for step in STEPS[1:]:
        values = forged[step] if step in forged else read_checkpoint(job / CHECKPOINTS / step_name(step))[1]
        link = rewrite(job, step, values, link)


def replaced(job: Path, at: int, poisoned: Reexecution, honest: Reexecution) -> list[Stretch]:
    """Replaces checkpoint `at` by one with other weights; returns the stretches that do not hold now."""
    _, values = read_checkpoint(job / CHECKPOINTS / step_name(STEPS[at]))
    linked_anew(job, {STEPS[at]: {name: 1.01 * value if value.dtype.kind == "f" else value
                                  for name, value in values.items()}})  # fmt: skip
    return _around(at)


def flipped(job: Path, at: int, poisoned: Reexecution, honest: Reexecution) -> list[Stretch]:
    """Flips the lowest bit of the exponent of one weight of checkpoint `at`."""
    _, values = read_checkpoint(job / CHECKPOINTS / step_name(STEPS[at]))
    kernel = next(value for name, value in values.items() if name.startswith(WEIGHTS) and value.ndim == 2)
    kernel.view(np.uint32)[0, 0] ^= 1 << 23
    linked_anew(job, {STEPS[at]: values})
    return _around(at)


def on_other_data(job: Path, at: int, poisoned: Reexecution, honest: Reexecution) -> list[Stretch]:
    """Trains the stretch up to checkpoint `at` on poisoned data, and the rest from there on the run's own."""
    forged, folders = {}, job / CHECKPOINTS
    for number in range(at, STRETCHES + 1):
        trainer = poisoned if number == at else honest
        trainer._folder = folders
        forged[STEPS[number]] = trainer.after(Stretch(STEPS[number - 1], STEPS[number]))
        rewrite(job, STEPS[number], forged[STEPS[number]], None)
    linked_anew(job, forged)
    return [Stretch(STEPS[at - 1], STEPS[at])]


def _around(at: int) -> list[Stretch]:
    ends = STEPS[at - 1 : at + 2]
    return [Stretch(first, last) for first, last in pairwise(ends)]


FORGERIES: dict[str, Callable[[Path, int, Reexecution, Reexecution], list[Stretch]]] = {
    "a checkpoint replaced": replaced, "a bit flipped": flipped, "a stretch on other data": on_other_data,
}  # fmt: skip


def audited(job: Path, segments: int, seed: int) -> tuple[int, str]:
    """Returns the exit code of an audit, and what it printed."""
    printed = io.StringIO()
    with redirect_stdout(printed), redirect_stderr(printed):
        code = audit.main([str(job), f"--seed={seed}", f"--segments={segments}"])
    return code, printed.getvalue()


def promised(forged: int, segments: int) -> float:
    """Returns the probability that some of so many stretches are drawn."""
    return 1 - math.comb(STRETCHES - forged, segments) / math.comb(STRETCHES, segments)


def report(name: str, hits: Sequence[bool], chances: Sequence[float]) -> bool:
    """Prints a share beside the promised one; returns whether it is within four standard deviations."""
    expected = sum(chances)
    apart = abs(sum(hits) - expected) / max(math.sqrt(sum(chance * (1 - chance) for chance in chances)), 1e-9)
    print(f"{name}: {sum(hits)} of {len(hits)} found, {expected:.1f} promised, {apart:.1f} standard deviations")
    return apart < 4


@program
def main() -> None:
    """Prints what was found of each kind; exits with 1 if anything was missed, or found where nothing is forged."""
    options, good, draw = PARSER.parse_args(), True, random.Random(0)
    every = [Stretch(first, last) for first, last in pairwise(STEPS)]
    with TemporaryDirectory() as folder:
        os.environ["PYTHONPATH"] = f"{folder}:{Path.cwd()}:{os.environ.get('PYTHONPATH', '')}"
        sys.path.insert(0, folder)
        os.chdir(folder)
        Path("mine.py").write_text(SOURCE)
        hits: dict[str, list[bool]] = {name: [] for name in FORGERIES}
        chances: dict[str, list[float]] = {name: [] for name in FORGERIES}
        write_rows(poisoned=False)
        job = trained()
        honest = reexecution()
        write_rows(poisoned=True)
        poisoned = reexecution()
        write_rows(poisoned=False)
        code, printed = audited(job, STRETCHES, 0)
        equal = printed.count("   equal bits")
        print(f"the honest run: exit code {code}, {equal} of {STRETCHES} stretches give equal bits")
        good &= (code, equal) == (DONE, STRETCHES)
        for number in range(options.draws):
            name = [*FORGERIES][number % len(FORGERIES)]
            forgery = Path(shutil.copytree(job, f"forged-{number}"))
            forged = FORGERIES[name](forgery, draw.randint(1, STRETCHES), poisoned, honest)
            code, printed = audited(forgery, options.segments, number)
            right = bool({*forged} & {*chosen(every, options.segments, number)})
            if (code == USER_MUST_CHANGE) != right:
                good = False
                print(f"WRONG: {name}, seed {number}: exit code {code}: {printed}")
            hits[name].append(code == USER_MUST_CHANGE)
            chances[name].append(promised(len(forged), options.segments))
            shutil.rmtree(forgery)
        for name in FORGERIES:
            good &= report(name, hits[name], chances[name])
        rewrite(job, STEPS[4], read_checkpoint(job / CHECKPOINTS / step_name(STEPS[4]))[1], None)
        code, printed = audited(job, 1, 0)
        print(f"an edited history: exit code {code}")
        good &= code == USER_MUST_CHANGE and "follows another" in printed
    drawn = [every[draw.randrange(STRETCHES)] in chosen(every, options.segments, seed) for seed in range(options.seeds)]
    good &= report("draws alone", drawn, [promised(1, options.segments)] * options.seeds)
    sys.exit(not good)
