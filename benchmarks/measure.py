"""Alternating repeats, their medians and ratios, kept as JSON. Only ratios within one run carry over elsewhere."""

import argparse
import importlib.util
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

Item = TypeVar("Item")

RESULTS = Path(__file__).parent / "results"


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


def refuse_unknown(parser: argparse.ArgumentParser, flag: str, given: str, known: Collection[str]) -> list[str]:
    """The names in `given`, which commas separate; ends with a usage error where one is not known."""
    names = given.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"{flag}={given}: there is no {unknown[0]!r}: take some of {','.join(known)}")
    return names


def images_per_second(run: Callable[[int], int], seconds: float) -> Callable[[], float]:
    """A measurement: calls `run(steps)`, which returns the images it read, for about `seconds`."""

    def measure() -> float:
        began, images = time.perf_counter(), 0
        while (passed := time.perf_counter() - began) < seconds:
            images += run(10)
        return images / passed if passed else 0.0

    return measure


def table(found: Mapping[str, list[float]], against: str, unit: str) -> list[str]:
    """Lines of Markdown: median, spread, and the median of the ratios to `against` in the same round."""
    lines = [f"| | {unit} (median) | lowest to highest | ours is |", "|---|--:|--:|--:|"]
    for name, values in found.items():
        ratios = [mine / other for mine, other in zip(found[against], values, strict=True)]
        spread = f"{min(values):,.4g} - {max(values):,.4g}"
        ratio = "" if name == against else f"{statistics.median(ratios):.2f} x"
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
