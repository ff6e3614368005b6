"""Alternating repeats, their medians and ratios, kept as JSON. Only ratios within one run carry over elsewhere."""

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
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from trainer.errors import PlatformFault, UserError

Item = TypeVar("Item")

RESULTS = Path(__file__).parent / "results"


def base_parser(doc: str | None, repeats: int = 0, seconds: float = 0.0) -> argparse.ArgumentParser:
    """The parser of the benchmark that `doc` describes: with --repeats and --seconds where a default is given."""
    parser = argparse.ArgumentParser(description=doc)
    if repeats:
        parser.add_argument("--repeats", type=count, default=repeats, help="rounds, each contender once in each")
    if seconds:
        parser.add_argument("--seconds", type=positive, default=seconds, help="of each measurement")
    return parser


def count(given: str) -> int:
    """The value of a flag: a whole number from 1 on."""
    number = int(given)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is too few: take 1 or more")
    return number


def counts(given: str) -> list[int]:
    """The value of a flag: whole numbers from 1 on, with commas."""
    return [count(part) for part in given.split(",")]


def positive(given: str) -> float:
    """The value of a flag: a finite number above 0."""
    number = float(given)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{given} is out of range: take more than 0")
    return number


def some_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """The value of a flag: some of these names, with commas."""

    def names(given: str) -> list[str]:
        found = given.split(",")
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"there is no {name!r}: take some of {','.join(known)}")
        return found

    return names


def run_main(main: Callable[[], None]) -> None:
    """Runs a benchmark as a program: what its user has to change is told in one line, without a traceback."""
    try:
        main()
    except (UserError, PlatformFault) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def alternate(contenders: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Each contender once a round, in turn, `repeats` rounds; what each returned."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, measure in contenders.items():
            found[name].append(measure())
    return found


def possible(contenders: Mapping[str, Item]) -> dict[str, Item]:
    """Those that can run on this machine; one line for what cannot."""
    missing = {}
    if importlib.util.find_spec("torch") is None:
        missing["PyTorch"] = "it is not installed"
    if not {"avx512_bf16", "amx_bf16"} & set(_cpu("flags").split()):
        missing["bfloat16"] = "this CPU has no instructions for it"
    for part, why in missing.items():
        if any(part in name for name in contenders):
            print(f"{part}: left out: {why}", flush=True)
    return {name: item for name, item in contenders.items() if not any(part in name for part in missing)}


def ratios(found: Mapping[str, list[float]], of: str, to: str) -> list[float]:
    """Of what two contenders gave in the same round, one for each."""
    return [one / other for one, other in zip(found[of], found[to], strict=True)]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The lower one, the median and the upper one."""
    low, median, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return low, median, high


def table(found: Mapping[str, list[float]], against: str, unit: str) -> list[str]:
    """Lines of Markdown: median, spread, and the median of the ratios of `against` to it in the same round."""
    lines = [f"| | {unit} (median) | lowest to highest | {against} is |", "|---|--:|--:|--:|"]
    for name, values in found.items():
        spread = f"{min(values):,.4g} - {max(values):,.4g}"
        ratio = "" if name == against else f"{statistics.median(ratios(found, against, name)):.2f} x"
        lines.append(f"| {name} | {statistics.median(values):,.4g} | {spread} | {ratio} |")
    return lines


def keep(name: str, content: Mapping[str, Any]) -> None:
    """Writes results/NAME.json with the machine and the date beside the raw numbers."""
    RESULTS.mkdir(exist_ok=True)
    machine = {
        "cores": os.cpu_count(),
        "processor": _cpu("model name") or platform.processor(),
        "python": platform.python_version(),
    }
    record = {"date": time.strftime("%Y-%m-%d"), "machine": machine, **content}
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


def _cpu(field: str) -> str:
    """A field of the first core in /proc/cpuinfo; empty where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")
