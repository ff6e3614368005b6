"""Measures one GPU in one command: `python -m benchmarks.gpu --minutes=10 --together`.

Parts run in the order of their value, each a process of its own with a log; one that fails or hangs
does not stop the next, and what it had measured is kept. The results are in --out: gpu_results.md
for people, and gpu_constants.json for `deploy plan`, to be copied to deploy/planning. Without an
NVIDIA driver all is rehearsed on a CPU with tiny sizes.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.gpu import halves, network
from benchmarks.gpu.part import kept, nvidia
from benchmarks.runner import make_parser, positive, program, some_of
from deploy.planning.step_time import CONSTANTS, FILE
from trainer.base.storage import write_whole

REHEARSED = "**A rehearsal on a CPU with tiny sizes: no number on this page is of a GPU.**"
DONE = "done"
LIMIT_SECONDS = 240.0  # of a part, where it need not wait for its turn
_LEAST_SECONDS = 20.0  # a part is not begun with less
_NETWORKS = {f"network_{case}": ["network", f"--case={case}"] for case in network.CASES}
PARTS: dict[str, Sequence[str]] = {
    "constants": ["constants"],
    **_NETWORKS,
    "halves": ["halves"],
    **{f"bits_{recipe}": ["halves", f"--bits={recipe}"] for recipe in halves.RECIPES},
}
PARSER = make_parser(__doc__)
PARSER.formatter_class = argparse.RawDescriptionHelpFormatter
PARSER.add_argument(
    "--minutes", type=positive, default=10.0, help="for all parts (default: %(default)s)"
)
PARSER.add_argument("--parts", type=some_of(PARTS), default=[*PARTS], help="default: all")
PARSER.add_argument(
    "--out",
    type=Path,
    default=Path("runs/gpu"),
    help="folder of the results (default: %(default)s)",
)
PARSER.add_argument(
    "--together",
    action="store_true",
    help="build parts in parallel, and measure them in turn",
)
Outcomes = dict[str, dict[str, Any]]


def run_parts(
    parts: Mapping[str, Sequence[str]], out: Path, minutes: float, *, together: bool
) -> Outcomes:
    """Runs the parts, each a module of this package with flags; writes the results anew after each.

    together: as many at once as there are cores.
    """
    until = time.monotonic() + 60 * minutes
    lock = threading.Lock()
    outcomes = Outcomes()

    def run(name: str) -> None:
        left = until - time.monotonic()
        began = time.monotonic()
        log = out / f"{name}.log"
        if left < _LEAST_SECONDS:
            outcome: dict[str, Any] = {"ended": "left out: the time was over"}
        else:
            module, *flags = parts[name]
            command = [sys.executable, "-m", f"benchmarks.gpu.{module}", *flags]
            limit = left if together else min(left, LIMIT_SECONDS)
            with log.open("wb") as output:
                try:
                    done = subprocess.run(
                        command, stdout=output, stderr=output, timeout=limit, check=False
                    )
                    ended = f"failed: {log.name} says why" if done.returncode else DONE
                except subprocess.TimeoutExpired:
                    ended = f"was ended after {limit:.0f} s"
            outcome = {"ended": ended, "seconds": time.monotonic() - began, **kept(log)}
        print(f"{name}: {outcome['ended']}", flush=True)
        with lock:
            outcomes[name] = outcome
            _write({each: outcomes[each] for each in parts if each in outcomes}, out)

    with ThreadPoolExecutor((os.cpu_count() or 1) if together else 1) as threads:
        for _ in threads.map(run, parts):
            pass
    return outcomes


def _write(outcomes: Outcomes, out: Path) -> None:
    write_whole(out / "parts.json", json.dumps(outcomes, indent=1) + "\n")
    write_whole(
        out / "gpu_results.md",
        "\n".join(page(outcomes, nvidia("name,memory.total,driver_version"))) + "\n",
    )
    write_whole(out / FILE.name, json.dumps(constants(outcomes, nvidia("name")), indent=1) + "\n")


def constants(outcomes: Outcomes, gpus: Sequence[str]) -> dict[str, Any]:
    """Returns the content of gpu_constants.json: what was measured, and as before what was not."""
    found = {
        name: value
        for name, value in outcomes.get("constants", {}).items()
        if hasattr(CONSTANTS, name)
    }
    where = f"measured on {gpus[0]}, {time.strftime('%Y-%m-%d')}" if gpus else "rehearsed on a CPU"
    source = (
        f"{', '.join(found)} {where}; the others {CONSTANTS.source}" if found else CONSTANTS.source
    )
    return {**asdict(CONSTANTS), **found, "source": source}


def page(outcomes: Outcomes, gpus: Sequence[str]) -> Iterator[str]:
    """Yields the lines of the page, in Markdown."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("tensorflow", "keras"))
    yield from (
        "# What a GPU showed",
        "",
        f"{time.strftime('%Y-%m-%d')}, {', '.join(gpus) or REHEARSED}; {packages}.",
    )
    yield from ("", f"`{shlex.join(['python', '-m', 'benchmarks.gpu', *sys.argv[1:]])}`", "")
    yield from _table("part", ["ended", "seconds"], outcomes)
    networks = {name: outcome for name, outcome in outcomes.items() if name in _NETWORKS}
    yield from (
        "",
        "## Steps a second: our default, and how many times as fast as the best peer it is",
        "",
    )
    speeds = {name: dict(outcome.get("steps_per_second", {})) for name, outcome in networks.items()}
    for rates in speeds.values():
        peers = [rate for way, rate in rates.items() if not way.startswith("ours")]
        if "ours" in rates and peers:
            rates["times"] = rates["ours"] / max(peers)
    yield from _table("network", [*network.WAYS, *network.TORCH, "times"], speeds)
    yield from ("", "## GiB of TensorFlow's peak, by default and plain, and what the plan says", "")
    yield from _table("network", ["peak_gib", "plain_gib", "planned_gib", "failed"], networks)
    yield from ("", "## Kernels and copies a step", "")
    yield from _table(
        "network",
        network.WAYS,
        {name: outcome.get("kernels", {}) for name, outcome in networks.items()},
    )
    yield from (
        "",
        (
            "## The share of the time in which a kernel runs: of the steps without a trace; within"
            " the trace"
        ),
        "",
    )
    yield from _table(
        "network",
        network.WAYS,
        {name: outcome.get("busy", {}) for name, outcome in networks.items()},
    )
    yield from ("", "## What CUDA holds", "")
    yield from _table("", ["context_gib"], {"": outcomes.get("constants", {})})
    yield from (
        "",
        "## Two halves of one GPU",
        "",
        "```",
        *outcomes.get("halves", {}).get("table", []),
        "```",
        "",
    )
    yield from _table(
        "",
        ["problems", "other_bits"],
        {n: o for n, o in outcomes.items() if n.startswith(("ha", "bi"))},
    )


def _table(
    first: str, columns: Sequence[str], rows: Mapping[str, Mapping[str, Any]]
) -> Iterator[str]:
    yield f"| {first} | {' | '.join(columns)} |"
    yield "|---|" + len(columns) * "--:|"
    for name, row in rows.items():
        cells = (_cell(row.get(column)) for column in columns)
        yield f"| {name.removeprefix('network_')} | {' | '.join(cells)} |"


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return "; ".join(map(_cell, value)) or "none"
    text = f"{value:,.4g}" if isinstance(value, float) else str("" if value is None else value)
    return text.replace("|", "/")


@program
def main() -> None:
    """Runs the parts and prints the page; exits with 1 if a part is not done."""
    args = PARSER.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    outcomes = run_parts(
        {name: PARTS[name] for name in args.parts}, args.out, args.minutes, together=args.together
    )
    print((args.out / "gpu_results.md").read_text(encoding="utf-8"))
    sys.exit(any(outcome["ended"] != DONE for outcome in outcomes.values()))
