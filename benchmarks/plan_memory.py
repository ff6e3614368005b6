"""Proves the predictions of memory: `python -m benchmarks.plan_memory` measures what `trainer.plan`
predicts.

Predicts the step of each recipe, scaled down, of own models and of two with skip connections at
twice the largest number of rows that it ran, and runs that many. Then gives a process just the
memory (`TF_CPU_BFC_MEM_LIMIT_IN_MB`) in which that batch is said to be the largest that surely
fits, and counts in how many tries it runs. Steps run in processes: `python -m
benchmarks.plan_memory --only=measure --rows=64 FLAGS`.
"""

import json
import math
import os
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
    "wgan_gp_fashion": [
        "--recipe=wgan_gp_fashion",
        "--data=digits",
        "--width=16",
        "--critic_steps=3",
    ],
    "wgan_gp_photos": ["--recipe=wgan_gp_photos", "--data=digits", "--width=8", "--critic_steps=2"],
    "efficientnet_photos": [
        "--recipe=efficientnet_photos",
        "--data=digits",
        "--variant=B0",
        "--image_size=64",
        "--weights=none",
        "--fine_tune_from=",
        "--fine_tune_after_steps=0",
        "--evaluation_fraction=0.1",
    ],
    "examples/table.py": ["--model=examples.table:build", "--data=examples.table:data"],
    "examples/text.py": ["--model=examples.text:build", "--data=examples.text:data"],
    "U-Net": [
        "--model=benchmarks.networks:unet",
        "--data=benchmarks.networks:masks",
        "--size=64",
        "--filters=16",
    ],
    "DenseNet": [
        "--model=benchmarks.networks:densenet",
        "--data=benchmarks.networks:photos",
        "--size=32",
    ],
    "examples/conditional_gan.py": [
        "--model=examples.conditional_gan:build",
        "--data=digits",
        "--image_size=16",
    ],
}
ROWS = 32
# a kernel may end the process instead
_EXHAUSTED = ("OOM when allocating", "Current allocation summary follows")
PARSER = make_parser(__doc__)
PARSER.add_argument(
    "--only",
    choices=("predict", "measure"),
    help="one step of the flags that follow, in this process",
)
PARSER.add_argument("--rows", type=count, default=ROWS)
PARSER.add_argument(
    "--tries", type=int, default=1, help="of the largest batch that fits, in each case"
)
PARSER.add_argument("--cases", type=some_of(CASES), default=[*CASES])


def child(only: str, rows: int, flags: Sequence[str], limit_mb: int = 0) -> dict[str, Any]:
    """Returns what a process of its own finds; {"exhausted": True} if TensorFlow ran out of memory.

    After some of these errors kernels of oneDNN end the process.
    """
    command = [
        sys.executable,
        "-m",
        "benchmarks.plan_memory",
        f"--only={only}",
        f"--rows={rows}",
        *flags,
    ]
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
    """Predicts a step of twice `rows` from those of a half and all of them; runs in the process of
    `child`.

    `worst_order`: how many times as much it may hold; `limit`: the MiB in which that is the largest
        batch that fits.
    """
    from deploy.planning.tier_memory import FRAGMENTS
    from trainer.base.run_files.plan_file import peak_of
    from trainer.planning.peak_memory import COUNTED, peak_lines, sizes_by_rows, worst_order

    (small, _) = _trace(rows // 2, flags)
    (large, state) = _trace(rows, flags)
    sizes = sizes_by_rows(small, large)
    lines = {
        name: peak_lines(large, sizes, state, temporaries=name == "cpu")
        for name in ("device", "cpu")
    }
    worst = max(worst_order(trace, state, COUNTED) for trace in (small, large))
    found = {name: peak_of(each, 2 * rows) for name, each in lines.items()}
    return {
        **found,
        "worst_order": worst,
        "limit": math.ceil(found["cpu"] * worst * FRAGMENTS / 2**20),
    }


def measured(rows: int, flags: Sequence[str]) -> dict[str, Any]:
    """Measures a step of `rows`, and how many times as much it may hold; runs in the process of
    `child`."""
    from trainer.planning.peak_memory import COUNTED, peak_bytes, worst_order

    trace, state = _trace(rows, flags)
    peaks = {
        name: peak_bytes(trace, state, temporaries=name == "cpu") for name in ("device", "cpu")
    }
    return {**peaks, "worst_order": worst_order(trace, state, COUNTED)}


def _trace(rows: int, flags: Sequence[str]) -> Any:
    from trainer.base.settings.request import Overrides
    from trainer.data.sources import load_dataset
    from trainer.planning.planner import measure_step
    from trainer.run.training_setup import set_precision_and_seed

    config = Overrides.parse(flags).config
    set_precision_and_seed(config)
    step, trace = measure_step(config, load_dataset(config), rows)
    return trace, step.state_bytes


def tried(name: str, tries: int = 1, rows: int = ROWS) -> dict[str, Any]:
    """Predicts and measures a case, and runs it `tries` times with the memory that it needs at
    most."""
    flags = CASES[name]
    guess = child("predict", rows, flags)
    found = child("measure", 2 * rows, flags)
    runs = [
        "exhausted" not in child("measure", 2 * rows, flags, guess["limit"]) for _ in range(tries)
    ]
    return {"predicted": guess, "measured": found, "runs": runs}


def _row(name: str, case: Mapping[str, Any]) -> str:
    cells = []
    for kind in ("device", "cpu"):
        guess = case["predicted"][kind]
        found = case["measured"][kind]
        cells.append(f"{guess / 1e6:.1f}, {found / 1e6:.1f}, {100 * (guess / found - 1):+.1f} %")
    cells.append(f"{case['predicted']['worst_order']:.2f}")
    cells.append(f"{sum(case['runs'])} of {len(case['runs'])} in {case['predicted']['limit']} MiB")
    return f"| `{name}` | {' | '.join(cells)} |"


@program
def main() -> None:
    """Prints the table, or what one process found."""
    options, flags = PARSER.parse_known_args()
    if options.only:
        print(
            json.dumps((predicted if options.only == "predict" else measured)(options.rows, flags))
        )
        return
    raw = {}
    for name in options.cases:
        raw[name] = tried(name, options.tries, options.rows)
        save("plan_memory", cases=raw)
    lines = [
        (
            "| | a GPU would hold: predicted, measured (MB) | a CPU | worst order | the largest"
            " that fits runs |"
        ),
        "|---|--:|--:|--:|---|",
    ]
    lines += [_row(name, case) for name, case in raw.items()]
    print_table(
        f"A step of {2 * options.rows} rows, predicted from {options.rows // 2} and {options.rows}",
        lines,
    )
