"""Proves the predictions of memory: `python -m benchmarks.plan_memory` measures what `trainer.plan` predicts.

Predicts the step of each recipe, scaled down, and of three own models at twice the largest number of rows that it ran,
and runs that many. Then sets limits of memory (`TF_CPU_BFC_MEM_LIMIT_IN_MB`): at random ones, a real step runs out of
memory where the prediction says so, or it does not; and for some the largest batch that is said to fit runs, and one
10 % larger does not. Steps run in processes: `python -m benchmarks.plan_memory --only=measure --rows=64 FLAGS`.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.runner import count, make_parser, print_table, program, save, some_of
from trainer.plan import ENVIRONMENT

CASES = {
    "mlp_mnist": ["--recipe=mlp_mnist", "--data=digits"],
    "cnn_mnist": ["--recipe=cnn_mnist", "--data=digits", "--width=32"],
    "cnn_fashion": ["--recipe=cnn_fashion", "--data=digits", "--width=32"],
    "dcgan_mnist": ["--recipe=dcgan_mnist", "--data=digits", "--width=16"],
    "wgan_gp_digits": ["--recipe=wgan_gp_digits"],
    "wgan_gp_mnist": ["--recipe=wgan_gp_mnist", "--data=digits", "--width=16", "--critic_steps=2"],
    "wgan_gp_fashion": ["--recipe=wgan_gp_fashion", "--data=digits", "--width=16", "--critic_steps=3"],
    "wgan_gp_photos": ["--recipe=wgan_gp_photos", "--data=digits", "--width=8", "--critic_steps=2"],
    "efficientnet_photos": ["--recipe=efficientnet_photos", "--data=digits", "--variant=B0", "--image_size=64",
                            "--weights=none", "--fine_tune_from=", "--fine_tune_after_steps=0",
                            "--evaluation_fraction=0.1"],
    "examples/table.py": ["--model=examples.table:build", "--data=examples.table:data"],
    "examples/text.py": ["--model=examples.text:build", "--data=examples.text:data"],
    "examples/conditional_gan.py": ["--model=examples.conditional_gan:build", "--data=digits", "--image_size=16"],
}  # fmt: skip
MARGIN = 0.07  # of a limit: within it of what is predicted, either outcome is right
ROWS = 32
_AROUND = (0.99, 1.0, 1.01)  # of a number of rows
_EXHAUSTED = ("OOM when allocating", "Current allocation summary follows")  # a kernel may end the process instead
PARSER = make_parser(__doc__)
PARSER.add_argument("--only", choices=("predict", "measure"), help="one step of the flags that follow, in this process")
PARSER.add_argument("--rows", type=count, default=ROWS)
PARSER.add_argument("--limits", type=int, default=60, help="random limits of memory, over all cases")
PARSER.add_argument("--cases", type=some_of(CASES), default=[*CASES])
PARSER.add_argument("--seed", type=int, default=0)


def child(only: str, rows: int, flags: Sequence[str], limit_mb: int = 0) -> dict[str, Any]:
    """Returns what a process of its own finds; {"exhausted": True} if TensorFlow ran out of memory.

    After some of these errors kernels of oneDNN end the process.
    """
    command = [sys.executable, "-m", "benchmarks.plan_memory", f"--only={only}", f"--rows={rows}", *flags]
    environment = {**os.environ, **ENVIRONMENT, "TF_CPP_MIN_LOG_LEVEL": "1"}
    if limit_mb:
        environment["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = str(limit_mb)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if any(line in done.stderr for line in _EXHAUSTED):
        return {"exhausted": True}
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def predicted(rows: int, flags: Sequence[str]) -> dict[str, Any]:
    """Predicts a step of twice `rows` from those of a half and all of them; runs in the process of `child`.

    `limits`: bytes, at the first of which it cannot run, at the second it does; `largest`: the most rows that do then.
    """
    from trainer.base.run_files.plan_file import peak_of
    from trainer.planning.peaks import PeakMemory

    (small, _), (large, state) = _trace(rows // 2, flags), _trace(rows, flags)
    prediction = PeakMemory(small, large, state)
    limits = limits_of(prediction, 2 * rows)
    lines = {"device": prediction.device_lines(), "cpu": prediction.cpu_lines()}
    found = {name: peak_of(each, 2 * rows) for name, each in lines.items()}
    return {**found, "limits": limits, "largest": _largest(prediction, rows, _mib(limits[1]) * 2**20)}


def limits_of(prediction: Any, rows: int) -> tuple[int, int]:
    """Returns the least and the most memory, to 1 %, that a limited allocator may need for the step.

    Fragments make it more than what is held. They depend on single bytes: the sizes of rows around `rows` show it.
    """
    limits = [_limit(prediction, factor * rows) / factor for factor in _AROUND]
    return round(min(limits)), round(max(limits))


def _limit(prediction: Any, rows: float) -> int:
    too_little, enough = 0, 2**20
    while not prediction.fits(rows, enough):
        too_little, enough = enough, 2 * enough
    while enough > 1.01 * too_little:
        middle = (enough + too_little) // 2
        if prediction.fits(rows, middle):
            enough = middle
        else:
            too_little = middle
    return enough


def _largest(prediction: Any, rows: int, limit: int) -> int:
    """Returns the most rows, from `rows` on, that fit an allocator with `limit` bytes, as 1 % fewer and more do."""

    def fits(rows: int) -> bool:
        return all(prediction.fits(factor * rows, limit) for factor in _AROUND)

    step = 2 * rows
    while step := step // 2:
        rows += step * fits(rows + step)
    return rows


def _mib(limit: float) -> int:
    return max(1, round(limit / 2**20))


def measured(rows: int, flags: Sequence[str]) -> dict[str, Any]:
    """Measures a step of `rows`; runs in the process of `child`."""
    from trainer.planning.peaks import peak_bytes

    trace, state = _trace(rows, flags)
    return {name: peak_bytes(trace, state, temporaries=name == "cpu") for name in ("device", "cpu")}


def _trace(rows: int, flags: Sequence[str]) -> Any:
    from trainer.base.settings.resolution import resolve
    from trainer.data.sources import load_dataset
    from trainer.planning.allocations import traced
    from trainer.planning.measured_step import MeasuredStep
    from trainer.run.build import set_precision_and_seed

    config = resolve(flags).config
    set_precision_and_seed(config)
    built = []

    dataset = load_dataset(config)

    def build() -> MeasuredStep:
        built.append(MeasuredStep(config, dataset, rows))
        return built[0]

    return traced(rows, build), built[0].state_bytes


def agrees(limit: float, limits: Sequence[float], exhausted: bool) -> bool | None:
    """Returns whether the prediction was right; None if the limit is so near that it says neither."""
    if limits[0] * (1 - MARGIN) <= limit <= limits[1] * (1 + MARGIN):
        return None
    return exhausted == (limit < limits[0])


def tried(name: str, limits: Sequence[float], *, largest: bool = False) -> dict[str, Any]:
    """Predicts and measures a case, then runs it at limits, each a factor of the least that is said to do.

    `largest`: also runs, at that limit, the largest batch that is said to fit, and one 10 % larger.
    """
    flags = CASES[name]
    guess, found = child("predict", ROWS, flags), child("measure", 2 * ROWS, flags)
    outcomes: list[tuple[int, bool | None]] = []
    for limit_mb in (_mib(factor * guess["limits"][1]) for factor in limits):
        exhausted = "exhausted" in child("measure", 2 * ROWS, flags, limit_mb)
        outcomes.append((limit_mb, agrees(limit_mb * 2**20, guess["limits"], exhausted)))
    rows = (guess["largest"], -(-guess["largest"] * 11 // 10)) if largest else ()
    runs = {each: "exhausted" not in child("measure", each, flags, _mib(guess["limits"][1])) for each in rows}
    return {"predicted": guess, "measured": found, "limits": outcomes, "largest": runs}


def _row(name: str, case: Mapping[str, Any]) -> str:
    cells = []
    for kind in ("device", "cpu"):
        guess, found = case["predicted"][kind], case["measured"][kind]
        cells.append(f"{guess / 1e6:.1f}, {found / 1e6:.1f}, {100 * (guess / found - 1):+.1f} %")
    outcomes = [right for _, right in case["limits"]]
    cells.append(", ".join(str(outcomes.count(kind)) for kind in (True, None, False)))
    cells.append(", ".join(f"{rows} {'runs' if ran else 'does not'}" for rows, ran in case["largest"].items()))
    return f"| `{name}` | {' | '.join(cells)} |"


@program
def main() -> None:
    """Prints the table and the count of limits, or what one process found."""
    options, flags = PARSER.parse_known_args()
    if options.only:
        print(json.dumps((predicted if options.only == "predict" else measured)(options.rows, flags)))
        return
    draw, raw = random.Random(options.seed), {}
    for number, name in enumerate(options.cases):
        few = options.limits * (number + 1) // len(options.cases) - options.limits * number // len(options.cases)
        raw[name] = tried(name, [draw.uniform(0.6, 1.5) for _ in range(few)], largest=bool(few))
        save("plan_memory", cases=raw)
    lines = ["| | a GPU would hold: predicted, measured (MB) | a CPU | limits: right, too near to say, wrong | "
             "largest batch |", "|---|--:|--:|--:|---|"]  # fmt: skip
    lines += [_row(name, case) for name, case in raw.items()]
    print_table(f"A step of {2 * ROWS} rows, predicted from {ROWS // 2} and {ROWS}", lines)
