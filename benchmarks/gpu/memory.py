"""Compares the peak memory of a step with the plan's: `python -m benchmarks.gpu.memory`.

For each network: the plan, made on the CPU; the peak of TensorFlow's allocator; and, with a small budget of memory, the
largest batch that the plan says fits, and one 10 % larger.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.gpu.execution import RESULT, Results, rehearsing, turn
from benchmarks.gpu.networks import ROWS
from benchmarks.gpu.parts import CASES, MEMORY_CASES
from benchmarks.runner import count, make_parser
from deploy.planning.gpu_constants import CONSTANTS
from deploy.planning.tier_memory import FRAGMENTS
from trainer.base.run_files.plan_file import StepPlan, largest_rows, peak_of, read_plan
from trainer.plan import ENVIRONMENT

BUDGET_GIB = 6.0  # on a GPU
_STEPS = 3
PARSER = make_parser(__doc__)
PARSER.add_argument("--case", choices=CASES, help="measure this network in this process")
PARSER.add_argument("--rows", type=count, default=0)
PARSER.add_argument("--limit_mib", type=int, default=0, help="of the first GPU's memory (default: all of it)")


def main() -> None:
    """Keeps one entry for each network, or does what a child is asked for."""
    options = PARSER.parse_args()
    if options.case:
        with _at_most(options.limit_mib) if options.limit_mib else contextlib.nullcontext():
            print(json.dumps(step_memory(flags_of(options.case, options.rows))))
        return
    results, lines = Results(), dict[str, Any]()
    with turn(alone=False), ThreadPoolExecutor(1 if rehearsing() else len(MEMORY_CASES)) as threads:
        for case, line in zip(MEMORY_CASES, threads.map(measured, MEMORY_CASES), strict=True):
            lines[case] = line
            results.keep(networks=lines)


@contextlib.contextmanager
def _at_most(mib: int) -> Iterator[None]:
    """Gives TensorFlow so much memory of the first GPU; the trainer's growth cannot be set beside a limit."""
    import tensorflow as tf

    gpu = tf.config.list_physical_devices("GPU")[0]
    tf.config.set_logical_device_configuration(gpu, [tf.config.LogicalDeviceConfiguration(memory_limit=mib)])
    with patch.object(tf.config.experimental, "set_memory_growth"):
        yield


def flags_of(case: str, rows: int = 0) -> list[str]:
    """Returns the flags of a case, with its data as digits for a recipe, and another batch if `rows` is given."""
    flags, small = CASES[case]
    own = any(flag.startswith("--model=") for flag in flags)
    every = [*flags, *(small if rehearsing() else ()), *(() if own else ("--data=digits",)), "--replicas=1"]
    return [*every, *([f"--global_batch_size={rows}"] if rows else [])]


def measured(case: str) -> dict[str, Any]:
    """Returns the plan's peak and the measured one, in GiB, and what the largest batch does within the budget."""
    plan = _plan(case)
    from trainer.base.settings.resolution import resolve

    rows = resolve(flags_of(case)).config.global_batch_size
    lines = plan.memory.cpu if rehearsing() else plan.memory.device
    result: dict[str, Any] = {"rows": rows, "planned_gib": peak_of(lines, rows) / 2**30, **_child(case, rows)}
    if "peak_gib" in result:
        result["workspace_gib"] = max(0.0, result["peak_gib"] - result["planned_gib"])
    budget = _budget(peak_of(lines, 4 * rows))
    # As `deploy plan` counts, but for CUDA's context, which is not of TensorFlow's limit.
    beside = 0.0 if rehearsing() else 1.5 * 2**30 * CONSTANTS.workspace_gib
    most = largest_rows(lines, (budget - beside) / (plan.memory.worst_order * FRAGMENTS))
    most = min(most, ROWS * 10 // 11)  # one 10 % larger is tried too
    tried = {rows: _child(case, rows, budget) for rows in (most, -(-most * 11 // 10)) if rows}
    outcomes = {rows: outcome.get("problem", "runs") for rows, outcome in tried.items()}
    return {**result, "budget_gib": budget / 2**30, "largest_batch": outcomes}


def _plan(case: str) -> StepPlan:
    """Returns the plan, made without a GPU: one that lies beside the results is not made again."""
    beside = Path(os.environ.get(RESULT) or Path.cwd() / "runs" / "gpu" / "memory.json").parent
    file = beside / "plans" / f"{case}{'-rehearsed' if rehearsing() else ''}.json"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "trainer.plan", *flags_of(case), f"--out={file}"]
        subprocess.run(command, check=True, env={**os.environ, **ENVIRONMENT}, stdout=sys.stderr)
    return read_plan(file)


def _budget(wanted: float) -> float:
    """Returns the bytes within which the largest batch is looked for."""
    return max(wanted, 64 * 2**20) if rehearsing() else BUDGET_GIB * 2**30


def _child(case: str, rows: int, limit: float = 0.0) -> dict[str, Any]:
    """Returns what `step_memory` finds in a process of its own; kernels may end it where memory runs out.

    limit: the bytes of the device that it can have; 0: all.
    """
    command = [sys.executable, "-m", "benchmarks.gpu.memory", f"--case={case}", f"--rows={rows}"]
    command += [f"--limit_mib={round(limit / 2**20)}"] if limit and not rehearsing() else []
    of_cpu = {"TF_CPU_BFC_MEM_LIMIT_IN_MB": str(round(limit / 2**20))} if limit else {}
    environment = {**os.environ, "TF_CPU_ALLOCATOR_USE_BFC": "1", **of_cpu} if rehearsing() else None
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    last = done.stdout.strip().splitlines()
    if done.returncode or not last:
        return {"problem": _problem(done.stderr)}
    content: dict[str, Any] = json.loads(last[-1])
    return content


def _problem(errors: str) -> str:
    """Returns `out of memory`, or the last error that the process printed."""
    if any(words in errors for words in ("OOM when allocating", "Current allocation summary follows", "exhausted")):
        return "out of memory"
    lines = [line for line in errors.splitlines() if "Error" in line]
    return (lines or errors.strip().splitlines() or ["no reason was given"])[-1][:200]


def step_memory(flags: Sequence[str]) -> dict[str, Any]:
    """Returns the peak of TensorFlow's allocator in some steps, in GiB."""
    import tensorflow as tf

    from benchmarks.trainer_loop import TrainingLoop, setup_of

    setup = setup_of(*flags)
    loop = TrainingLoop(setup)
    loop(_STEPS)
    peak = tf.config.experimental.get_memory_info(setup.replicas.devices[0])["peak"] / 2**30
    return {"peak_gib": peak}


if __name__ == "__main__":
    main()
