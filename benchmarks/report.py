"""The report of many runs: `python -m benchmarks.report`."""

import argparse
import contextlib
import io
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.measure import base_parser, count, keep, run_main
from deploy.report.collection import repeat_folder
from deploy.report.html_page import write_report
from tests.deploy.planted import plant


def report_seconds(tiers: int, epochs: int) -> float:
    """Seconds to read, measure, judge and draw `tiers` runs of `epochs` epochs, ten reports each."""
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1, tiers + 1):
            times = [(0.1 + 0.01 * (index % 7)) / number for index in range(epochs)]
            job_dir = plant(repeat_folder(Path(folder), f"tier{number}", 1), times, epochs=True)
            lines = (job_dir / "stats.jsonl").read_text().splitlines(keepends=True)
            reports = (line.replace('"epoch"', '"report"', 1) * 10 for line in lines)
            (job_dir / "stats.jsonl").write_text("".join(r + line for r, line in zip(reports, lines, strict=True)))
        prices = {f"tier{number}": float(number) for number in range(1, tiers + 1)}
        began = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()):
            write_report([folder], folder, usd_by_tier=prices)
        return time.perf_counter() - began


def make_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = base_parser(__doc__, repeats=5)
    parser.add_argument("--tiers", type=count, default=8)
    parser.add_argument("--epochs", type=count, default=1000)
    return parser


def main() -> None:
    """Prints the median and keeps the raw numbers."""
    given = make_parser().parse_args()
    reports = [report_seconds(given.tiers, given.epochs) for _ in range(given.repeats)]
    print(f"report of {given.tiers} tiers x {given.epochs:,} epochs: {statistics.median(reports):.2f} s")
    keep("report", {"command": "python -m benchmarks.report", "report_seconds": reports})


if __name__ == "__main__":
    run_main(main)
