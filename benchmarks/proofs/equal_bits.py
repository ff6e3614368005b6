"""Tries --virtual_replicas on recipes and examples: `python -m benchmarks.proofs.equal_bits [--only=NAME]`.

Each trains some steps of few rows as a whole job, in its own processes, on 1, 2 and 4 replicas and on 2 workers, and
once on 1 replica, killed by SIGKILL after its first checkpoint, and resumed on 4; the SHA-256 of all variables in the
result.json of each must be the same.
Then, in turns, it measures a step of 2 replicas' virtual replicas against one of as many micro-batches, each on all
cores in a process of its own (--steps=0: this alone).
"""

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from benchmarks.processes import CONSTANT_RATE, Candidate, started
from benchmarks.runner import alternate, make_parser, program, ratios
from tests.own_runs import EXAMPLES, arguments_of, recipe_flags
from trainer.base.run_files.records import read_result
from trainer.base.run_files.run_layout import CHECKPOINTS, MANIFEST, STEP_PREFIX
from trainer.base.settings.resolution import recipe_names

PARSER = make_parser(__doc__, seconds=2.0)
PARSER.add_argument("--only", default="", help="cases whose name contains this")
PARSER.add_argument("--steps", type=int, default=4, help="of each run whose bits are compared; 0: none")
PARSER.add_argument("--precision", default="float32")
PARSER.add_argument("--turns", type=int, default=3, help="of each way to measure a step; 0: none")
VIRTUAL = 4
# Each of two workers has half of this machine's cores: with other numbers of threads, kernels add in another order.
THREADS = {"TF_NUM_INTRAOP_THREADS": "1", "OMP_NUM_THREADS": "1"}
SMALL = [
    "--global_batch_size=16", "--tensorboard=false", "--checkpoint_every_steps=2", "--jit_compile=false",
    "--learning_rate_schedule=constant",  # which a shorter run, resumed, has in common with a longer one
]  # fmt: skip
WAYS = {"1 replica": ["--replicas=1"], "2 replicas": ["--replicas=2"], "4 replicas": ["--replicas=4"]}


def cases() -> Iterator[tuple[str, list[str]]]:
    """Yields names and flags."""
    for name in EXAMPLES:
        yield f"example {name}", [word for word in arguments_of(name) if not word.startswith(("--steps", "--job_dir"))]
    for name in recipe_names():
        yield f"recipe {name}", recipe_flags(name)


def trained(folder: Path, flags: list[str], *, workers: bool = False) -> dict[str, object]:
    """Runs one job; returns its result, with `error` if it failed."""
    local = [sys.executable, "-m", "deploy", "local", "job_configs/cpu-2workers.yaml"]
    program_of = local if workers else [sys.executable, "-m", "trainer.task"]
    done = subprocess.run(
        [*program_of, *flags, f"--job_dir={folder}"], capture_output=True, text=True, timeout=1800, check=False,
        env={**os.environ, **THREADS},
    )  # fmt: skip
    result = dict(read_result(folder)[0])
    return result if done.returncode == 0 else {"error": (done.stdout + done.stderr)[-600:]}


def digests(flags: list[str], folder: Path, steps: int) -> dict[str, object]:
    """Returns the SHA-256 of all variables by the way in which they were trained, or what failed."""
    shared = [*flags, *SMALL, f"--virtual_replicas={VIRTUAL}"]
    results = {way: trained(folder / way, [*shared, f"--steps={steps}", *more]) for way, more in WAYS.items()}
    results["2 workers"] = trained(folder / "workers", [*shared, f"--steps={steps}"], workers=True)
    killed = kill_after_a_checkpoint(folder / "resumed", [*shared, f"--steps={steps}", "--replicas=1"])
    results["resumed on 4"] = trained(folder / "resumed", [*shared, f"--steps={steps}", "--replicas=4"])
    if not killed:
        results["resumed on 4"] = {"error": "it had ended before it was killed"}
    return {way: _digest(result) for way, result in results.items()}


def kill_after_a_checkpoint(folder: Path, flags: list[str]) -> bool:
    """Starts a job, kills it once it has saved its first checkpoint; returns whether it had not ended by itself."""
    with subprocess.Popen(
        [sys.executable, "-m", "trainer.task", *flags, f"--job_dir={folder}"], stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, env={**os.environ, **THREADS},
    ) as job:  # fmt: skip
        while job.poll() is None and not list(folder.glob(f"{CHECKPOINTS}/{STEP_PREFIX}*/{MANIFEST}")):
            time.sleep(0.005)
        job.kill()
    return job.returncode == -signal.SIGKILL


def _digest(result: dict[str, object]) -> object:
    """Returns the SHA-256 of a run's variables, or None after printing why there is none."""
    bits = result.get("equal_bits")
    if isinstance(bits, dict):
        return bits["sha256"]
    print(result.get("error") or "it has no digest", flush=True)
    return None


def cost(flags: list[str], turns: int, seconds: float) -> float:
    """Returns the time of a step on 2 replicas with virtual replicas over that of the same micro-batches."""
    ways = f"--virtual_replicas={VIRTUAL}", f"--micro_batches={VIRTUAL // 2}"
    shared = [*flags, *SMALL, *CONSTANT_RATE, "--replicas=2"]
    makers: dict[str, Callable[[], Candidate]] = {
        way: partial(Candidate, "trainer_loop", [*shared, way], 1, multiple=3) for way in ways
    }
    with started(makers, seconds) as candidates:
        return statistics.median(ratios(alternate(candidates, turns), ways[1], ways[0]))


@program
def main() -> None:
    """Prints a line for each case; exits with 1 if the bits of any differ."""
    options, unequal = PARSER.parse_args(), 0
    for name, flags in cases():
        if options.only not in name:
            continue
        precise = [*flags, f"--precision={options.precision}"]
        if options.steps:
            with tempfile.TemporaryDirectory() as folder:
                by_way = digests(precise, Path(folder), options.steps)
            unequal += len({*by_way.values()}) > 1 or None in by_way.values()
            for way, digest in by_way.items():
                print(f"{name}, {way}: {digest}", flush=True)
        if options.turns:
            print(f"{name}: {cost(precise, options.turns, options.seconds):.2f} x micro-batches", flush=True)
    sys.exit(bool(unequal))
