"""Predicts published step times on more GPUs, each from all other configurations: `python -m benchmarks.backtest`.

Nothing is timed. A configuration is held out with all its GPUs; docs/compare.md shows the table.
"""

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.runner import make_parser, print_table, program, save
from deploy.planning.interval import Interval
from deploy.planning.scaling import Case, calibrated, cases, interval

COVERAGE, HALF_WIDTHS = 0.9, {True: 0.12, False: 0.25}  # what must be reached, by whether the rows a GPU stay
PARSER = make_parser(__doc__)


class Outcome(NamedTuple):
    """Holds a prediction and what was published."""

    case: Case
    predicted: Interval

    @property
    def inside(self) -> bool:
        """Returns whether the published time is within the interval."""
        return self.predicted.low <= self.case.target.seconds <= self.predicted.high


def held_out(known: Sequence[Case]) -> list[Outcome]:
    """Returns each case's prediction, calibrated on the other configurations only."""
    found = []
    for case in known:
        errors = calibrated(other for other in known if other.configuration != case.configuration)
        target = case.target
        found.append(Outcome(case, interval(case.few, case.many, target.devices, target.rows, errors)))
    return found


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """Returns Markdown: by kind of prediction, how many are inside, the widest interval, the errors of the middle."""
    lines = ["| rows a GPU | predictions | inside | half-width, at most | error of the middle: median, largest |",
             "|---|--:|--:|--:|--:|"]  # fmt: skip
    for name, stay in (("stay", True), ("shrink", False)):
        some = [each for each in outcomes if each.case.rows_stay == stay]
        errors = sorted(abs(each.case.target.seconds / each.predicted.middle - 1) for each in some)
        widest = max(each.predicted.half_width for each in some)
        inside = sum(each.inside for each in some)
        lines.append(
            f"| {name} | {len(some)} | {inside} | {widest:.1%} | {errors[len(errors) // 2]:.1%}, {errors[-1]:.1%} |"
        )
    return lines


@program
def main() -> None:
    """Prints the table and every prediction; saves them."""
    PARSER.parse_args()
    outcomes = held_out(cases())
    print_table("Published times on more GPUs, predicted from fewer", table(outcomes))
    lines = ["| configuration | GPU | from | to | predicted | published |", "|---|---|---|---|--:|--:|"]
    for case, found in outcomes:
        given = f"{case.few.devices}, {case.many.devices}"
        lines.append(f"| {case.configuration} | {case.gpu} | {given} | {case.target.devices} | "
                     f"{found.middle:.2f} ({found.low:.2f} - {found.high:.2f}) | "
                     f"{case.target.seconds:.2f} |")  # fmt: skip
    print_table("Seconds for 1,000 images", lines)
    save("backtest", inside=sum(each.inside for each in outcomes), predictions=len(outcomes))
