"""Compares the peak memory of a step with the plan's: `python -m benchmarks.gpu.memory`.

For each network: the plan, made on the CPU; the peak of TensorFlow's allocator; and, with a small budget of memory, the
largest batch that the plan says fits, and one 10 % larger. On a GPU another process holds the rest of its memory.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.execution import Results, rehearsing
from benchmarks.gpu.networks import ROWS
from benchmarks.gpu.nvidia import used_gib
from benchmarks.gpu.parts import CASES, MEMORY_CASES
from benchmarks.runner import count, make_parser
from trainer.base.run_files.plan_file import largest_rows, peak_of, read_plan
from trainer.plan import ENVIRONMENT

BUDGET_GIB = 6.0  # on a GPU
_STEPS = 3
PARSER = make_parser(__doc__)
PARSER.add_argument("--case", choices=CASES, help="measure this network in this process")
PARSER.add_argument("--rows", type=count, default=0)
PARSER.add_argument("--hold_gib", type=float, default=0.0, help="hold so much memory of the GPU until the end")


def main() -> None:
    """Keeps one entry for each network, or does what a child is asked for."""
    options = PARSER.parse_args()
    if options.hold_gib:
        hold(options.hold_gib)
    elif options.case:
        print(json.dumps(step_memory(flags_of(options.case, options.rows))))
    else:
        results, lines = Results(), dict[str, Any]()
        for case in MEMORY_CASES:
            lines[case] = measured(case)
            results.keep(networks=lines)


def flags_of(case: str, rows: int = 0) -> list[str]:
    """Returns the flags of a case, with its data as digits for a recipe, and another batch if `rows` is given."""
    flags, small = CASES[case]
    own = any(flag.startswith("--model=") for flag in flags)
    every = [*flags, *(small if rehearsing() else ()), *(() if own else ("--data=digits",)), "--replicas=1"]
    return [*every, *([f"--global_batch_size={rows}"] if rows else [])]


def measured(case: str) -> dict[str, Any]:
    """Returns the plan's peak and the measured one, in GiB, and what the largest batch does within the budget."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        command = [sys.executable, "-m", "trainer.plan", *flags_of(case), f"--out={file}"]
        subprocess.run(command, check=True, env={**os.environ, **ENVIRONMENT}, stdout=sys.stderr)
        plan = read_plan(file)
    from trainer.base.settings.resolution import resolve

    rows = resolve(flags_of(case)).config.global_batch_size
    lines = plan.memory.cpu if rehearsing() else plan.memory.device
    result: dict[str, Any] = {"rows": rows, "planned_gib": peak_of(lines, rows) / 2**30, **_child(case, rows)}
    if "peak_gib" in result:
        result["workspace_gib"] = max(0.0, result["peak_gib"] - result["planned_gib"])
    budget = _budget(peak_of(lines, 4 * rows))
    # What a GPU needs beside the tensors was measured with the batch itself.
    most = largest_rows(lines, budget - 2**30 * result.get("workspace_gib", 0.0))
    most = min(most, ROWS * 10 // 11)  # one 10 % larger is tried too
    with _only(budget) as environment:
        tried = {each: _child(case, each, environment) for each in (most, -(-most * 11 // 10)) if each}
    outcomes = {each: found.get("problem", "runs") for each, found in tried.items()}
    return {**result, "budget_gib": budget / 2**30, "largest_batch": outcomes}


def _budget(wanted: float) -> float:
    """Returns the bytes within which the largest batch is looked for."""
    return max(wanted, 64 * 2**20) if rehearsing() else BUDGET_GIB * 2**30


@contextlib.contextmanager
def _only(budget: float) -> Iterator[dict[str, str]]:
    """Yields variables for processes that then can have `budget` bytes of the device."""
    if rehearsing():
        yield {"TF_CPU_BFC_MEM_LIMIT_IN_MB": str(round(budget / 2**20))}
        return
    query = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits", "--id=0"]
    free = float(subprocess.run(query, capture_output=True, text=True, check=True).stdout) / 1024
    context = 2 * 0.6  # of the process that holds and of the one that is measured
    command = [sys.executable, "-m", "benchmarks.gpu.memory", f"--hold_gib={free - budget / 2**30 - context}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        process.stdout.readline()  # it holds the memory
        yield {}
    finally:
        process.kill()
        process.communicate()


def hold(gib: float) -> None:
    """Allocates memory of the first GPU and waits to be ended."""
    import tensorflow as tf

    gpu = tf.config.list_physical_devices("GPU")[0]
    limit = tf.config.LogicalDeviceConfiguration(memory_limit=round(1024 * gib))
    tf.config.set_logical_device_configuration(gpu, [limit])
    with tf.device("GPU:0"):
        kept = tf.ones(8)
    print(float(kept[0]), flush=True)
    time.sleep(600)


def _child(case: str, rows: int, environment: dict[str, str] | None = None) -> dict[str, Any]:
    """Returns what `step_memory` finds in a process of its own; kernels may end it where memory runs out."""
    command = [sys.executable, "-m", "benchmarks.gpu.memory", f"--case={case}", f"--rows={rows}"]
    bfc = {"TF_CPU_ALLOCATOR_USE_BFC": "1"}
    done = subprocess.run(command, env={**os.environ, **bfc, **(environment or {})}, capture_output=True, text=True,
                          check=False)  # fmt: skip
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
    """Returns the peak of TensorFlow's allocator in some steps and what the process takes beside it, in GiB."""
    before = used_gib()
    import tensorflow as tf

    from benchmarks.trainer_loop import TrainingLoop, setup_of

    setup = setup_of(*flags)
    loop = TrainingLoop(setup)
    loop(_STEPS)
    peak = tf.config.experimental.get_memory_info(setup.replicas.devices[0])["peak"] / 2**30
    after = used_gib()
    beside = {} if before is None or after is None else {"process_gib": after - before}
    return {"peak_gib": peak, **beside}


if __name__ == "__main__":
    main()
