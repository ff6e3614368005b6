"""Predicts published step times on more GPUs, each source by what the others show: `python -m
benchmarks.backtest`.

Nothing is timed. benchmarks/published_times.yaml has the tables; this makes the constants of
deploy/planning/extrapolation.py, and docs/decisions/13-plans.md shows what it prints. Every source
has the same weight, however many tables it has.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.runner import make_parser, print_table, program, save
from deploy.planning.extrapolation import Measurement, interval, seconds_on
from deploy.planning.step_time import Interval
from trainer.base.settings.yaml_file import read_yaml

TABLES = Path(__file__).with_name("published_times.yaml")
# of the errors, left out at each end: chosen so that 90 % of the held tables are inside too
TAILS = 0.02, 0.01
PARSER = make_parser(__doc__)


class Case(NamedTuple):
    """Describes a prediction: from two published points of a series to a third."""

    source: str
    held: bool
    series: str
    few: Measurement
    many: Measurement
    target: Measurement

    @property
    def rows_stay(self) -> bool:
        """Returns whether the rows of a micro-batch are the same in all three."""
        return self.few.rows == self.many.rows == self.target.rows

    @property
    def error(self) -> float:
        """Returns the published time over the predicted one."""
        return self.target.seconds / seconds_on(
            self.few, self.many, self.target.devices, self.target.rows
        )

    @property
    def predicted(self) -> Interval:
        """Returns the prediction with its interval."""
        return interval(self.few, self.many, self.target.devices, self.target.rows)


@cache
def cases() -> tuple[Case, ...]:
    """Returns every prediction that the tables allow."""
    return tuple(_cases(read_yaml(TABLES, TABLES.name)["sources"]))


def _cases(sources: Sequence[Mapping[str, Any]]) -> Iterator[Case]:
    for source in sources:
        for network, gpu, rows, values in source["series"]:
            points = [
                Measurement(
                    count,
                    rows[count] if isinstance(rows, dict) else 1,
                    1 / value if source["unit"].endswith("/s") else value,
                )
                for count, value in sorted(values.items())
            ]
            for few, many, target in combinations(points, 3):
                yield Case(
                    source["name"],
                    source.get("held", False),
                    f"{network}, {gpu}, {rows}",
                    few,
                    many,
                    target,
                )


def by_source(known: Iterable[Case]) -> dict[str, list[Case]]:
    """Returns the cases of each source."""
    groups: dict[str, list[Case]] = {}
    for case in known:
        groups.setdefault(case.source, []).append(case)
    return groups


def range_of(groups: Mapping[str, Sequence[Case]]) -> tuple[float, float]:
    """Returns the errors between which all but TAILS lie, each source with the same weight."""
    errors = sorted((case.error, 1 / len(some)) for some in groups.values() for case in some)
    weights = [weight for _, weight in errors]
    low = next(
        error
        for place, (error, _) in enumerate(errors)
        if sum(weights[: place + 1]) >= TAILS[0] * sum(weights)
    )
    high = next(
        error
        for place, (error, _) in enumerate(errors)
        if sum(weights[: place + 1]) >= (1 - TAILS[1]) * sum(weights)
    )
    return low, high


class Outcome(NamedTuple):
    """Holds how many predictions of a source were inside, and the half-width of the intervals that
    others gave it."""

    source: str
    inside: int
    predictions: int
    half_width: float


def left_out(known: Iterable[Case]) -> list[Outcome]:
    """Returns each source's outcome by the range of the other sources."""
    groups = by_source(known)
    found = []
    for name, some in groups.items():
        low, high = range_of({other: each for other, each in groups.items() if other != name})
        inside = sum(low <= case.error <= high for case in some)
        found.append(Outcome(name, inside, len(some), (high - low) / (high + low)))
    return found


def half_width(interval: Interval) -> float:
    """Returns half of the width, relative to the middle of the two ends."""
    return (interval.high - interval.low) / (interval.high + interval.low)


def as_planned(known: Iterable[Case]) -> list[Outcome]:
    """Returns each source's outcome by the intervals that a plan prints."""
    found = []
    for name, some in by_source(known).items():
        inside = sum(
            case.predicted.low <= case.target.seconds <= case.predicted.high for case in some
        )
        found.append(
            Outcome(
                name,
                inside,
                len(some),
                statistics.median(half_width(case.predicted) for case in some),
            )
        )
    return found


def table(outcomes: Sequence[Outcome], known: Sequence[Case]) -> list[str]:
    """Returns Markdown: by source, how many predictions were inside, and the errors."""
    groups = by_source(known)
    lines = [
        (
            "| source | tables | predictions | inside | half-width | published / predicted: least,"
            " median, most |"
        ),
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, inside, count, half_width in outcomes:
        errors = sorted(case.error for case in groups[name])
        tables = len({case.series for case in groups[name]})
        lines.append(
            f"| {name} | {tables} | {count} | {inside / count:.0%} | {half_width:.0%} | "
            f"{errors[0]:.2f}, {statistics.median(errors):.2f}, {errors[-1]:.2f} |"
        )
    return lines


KINDS: Mapping[str, tuple[Callable[[Case], bool], Callable[[Iterable[Case]], list[Outcome]]]] = {
    "Rows stay, each source by the others": (
        lambda case: case.rows_stay and not case.held,
        left_out,
    ),
    "Rows stay, tables that calibrated nothing": (
        lambda case: case.rows_stay and case.held,
        as_planned,
    ),
    "Rows shrink, up to no gain": (lambda case: not case.rows_stay, as_planned),
}


@program
def main() -> None:
    """Prints the tables and saves the counts."""
    PARSER.parse_args()
    saved = {}
    for title, (is_of, outcomes_of) in KINDS.items():
        known = [case for case in cases() if is_of(case)]
        outcomes = outcomes_of(known)
        print_table(title, table(outcomes, known))
        saved[title] = {name: [inside, count] for name, inside, count, _ in outcomes}
    known = [case for case in cases() if case.rows_stay and not case.held]
    low, high = range_of(by_source(known))
    median = statistics.median(outcome.half_width for outcome in left_out(known))
    print(
        f"\nAll sources: {low:.3f} to {high:.3f}; half-width of those left out, median:"
        f" {median:.1%}"
    )
    save("backtest", kinds=saved)
