"""Runs measurements in turn, prints their medians and ratios, and writes them to results/*.json.

Only ratios within one run carry over to other machines. Also parses the flags that all benchmarks
share.
"""

import argparse
import importlib.util
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from trainer.base.errors import PlatformFault, UserError

Item = TypeVar("Item")

OPTIONAL = "PyTorch"  # in the name of a candidate that needs torch
RESULTS = Path(__file__).parent / "results"
PACKAGES = ("tensorflow", "keras", "torch")


def make_parser(doc: str | None, repeats: int = 0, seconds: float = 0.0) -> argparse.ArgumentParser:
    """Returns a parser with the description `doc`, and with --repeats and --seconds if a default is
    given."""
    parser = argparse.ArgumentParser(description=doc)
    if repeats:
        parser.add_argument(
            "--repeats", type=count, default=repeats, help="rounds; each measurement once per round"
        )
    if seconds:
        parser.add_argument("--seconds", type=positive, default=seconds, help="of each measurement")
    return parser


def count(value: str) -> int:
    """Parses a whole number from 1 on."""
    if int(value) < 1:
        raise argparse.ArgumentTypeError(f"{value} is too small: use 1 or more")
    return int(value)


def counts(value: str) -> list[int]:
    """Parses whole numbers from 1 on, separated by commas."""
    return [count(part) for part in value.split(",")]


def positive(value: str) -> float:
    """Parses a finite number above 0."""
    if not 0 < float(value) < math.inf:
        raise argparse.ArgumentTypeError(f"{value} is out of range: use a number above 0")
    return float(value)


def some_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """Returns a parser of names from `known`, separated by commas."""

    def names(value: str) -> list[str]:
        for name in value.split(","):
            if name not in known:
                raise argparse.ArgumentTypeError(
                    f"unknown name {name!r}: use some of {','.join(known)}"
                )
        return value.split(",")

    return names


def program(main: Callable[[], None]) -> Callable[[], None]:
    """Runs the decorated function if its module is the program; prints an error that the user can
    fix on one line."""
    try:
        if main.__module__ == "__main__":
            main()
    except (UserError, PlatformFault) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    return main


def elapsed(work: Callable[[], object]) -> float:
    """Returns the seconds that one call of `work` takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def alternate(
    candidates: Mapping[str, Callable[[], float]], repeats: int
) -> dict[str, list[float]]:
    """Measures every candidate once per round, in turn; returns the values of all rounds."""
    found: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(repeats):
        for name, measure in candidates.items():
            found[name].append(measure())
    return found


def compare(
    title: str, candidates: Mapping[str, Callable[[], float]], repeats: int
) -> dict[str, list[float]]:
    """Measures the candidates' seconds in turn and prints the table, with ratios to the first
    one."""
    found = alternate(candidates, repeats)
    print_table(title, table(found, "seconds"))
    return found


def possible(candidates: Mapping[str, Item]) -> dict[str, Item]:
    """Returns the candidates that this machine can run; prints a line about each kind that it
    cannot."""
    missing = {} if importlib.util.find_spec("torch") else {OPTIONAL: "it is not installed"}
    if not {"avx512_bf16", "amx_bf16"} & set(_cpu("flags").split()):
        missing["bfloat16"] = "this CPU has no instructions for it"
    for part, reason in missing.items():
        if any(part in name for name in candidates):
            print(f"{part}: left out: {reason}", flush=True)
    return {
        name: item for name, item in candidates.items() if not any(part in name for part in missing)
    }


def ratios(found: Mapping[str, list[float]], of: str, to: str) -> list[float]:
    """Returns the ratio of two candidates' values in each round."""
    return [one / other for one, other in zip(found[of], found[to], strict=True)]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Returns the lower quartile, the median and the upper quartile."""
    low, median, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return low, median, high


def table(found: Mapping[str, list[float]], unit: str) -> list[str]:
    """Returns Markdown: each median and range, and the median ratio of the first candidate to it
    within a round."""
    first = next(iter(found))
    lines = [f"| | {unit} (median) | lowest to highest | {first} is |", "|---|--:|--:|--:|"]
    for name, values in found.items():
        spread = f"{min(values):,.4g} - {max(values):,.4g}"
        ratio = "" if name == first else f"{statistics.median(ratios(found, first, name)):.2f} x"
        lines.append(f"| {name} | {statistics.median(values):,.4g} | {spread} | {ratio} |")
    return lines


def print_table(title: str, lines: Sequence[str]) -> None:
    """Prints a title and the lines of a table below it."""
    print("\n".join([f"\n{title}\n", *lines]), flush=True)


def save(name: str, **content: Any) -> None:
    """Writes results/NAME.json: the raw numbers with date, machine, command (paths shortened) and
    package versions."""
    processor = _cpu("model name") or platform.processor()
    record = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": {
            "cores": os.cpu_count(),
            "processor": processor,
            "python": platform.python_version(),
        },
        "command": " ".join(
            [f"python -m benchmarks.{Path(sys.argv[0]).stem}", *map(_without_folders, sys.argv[1:])]
        ),
        "packages": {name: version(name) for name in PACKAGES if importlib.util.find_spec(name)},
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps({**record, **content}, indent=1) + "\n")


def _without_folders(argument: str) -> str:
    """Returns an argument, or --flag=VALUE, with the name alone of a path that exists."""
    flag, equals, value = argument.rpartition("=")
    return flag + equals + Path(value).name if Path(value).exists() else argument


def _cpu(field: str) -> str:
    """Returns a field of the first core in /proc/cpuinfo, or "" if there is none."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")
