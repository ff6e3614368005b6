"""Fits what a plan says of a GPU's steps to those of eight networks: `python -m
benchmarks.plan_fit`. Nothing is timed.

benchmarks/h100_steps.yaml has the networks. A formula's numbers are those with the least squares of
the logarithms of predicted over measured times, none below 0; how slow gradients of batch norm over
few channels are, in plain steps, is taken from the kernels' own times. Each network is also
predicted by the others: the band is from the least to the most of these errors on the card that was
measured; what others published of other cards is shown beside them.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.runner import make_parser, print_table, program, save
from trainer.base.settings.yaml_file import read_yaml

STEPS = Path(__file__).with_name("h100_steps.yaml")
# Kernels that a convolution starts, beside that of an operation, in plain steps: changes of layout,
# and their copies. By kernels = 0.93 x operations + 5.2 x convolutions of the same page.
KERNELS = 5.6
H100 = "H100 TF32"
PARSER = make_parser(__doc__)
Numbers = npt.NDArray[np.float64]


class Step(NamedTuple):
    """Holds a measured step: seconds, weight, and what is counted of it for each number of the
    formula."""

    network: str
    card: str
    seconds: float
    weight: float
    counted: tuple[float, ...]
    # seconds of gradients of batch norm over few channels: counted, measured
    few: tuple[float, float] = (0.0, 0.0)
    # seconds of products without weights in compiled steps, by the factor of plain ones
    activations: float = 0.0


def few_channels(steps: Sequence[Step]) -> float:
    """Returns how many times as long as counted the gradients of batch norm over few channels
    took."""
    measured = [step.few for step in steps if step.few[1]]
    return (
        sum(seconds for _, seconds in measured) / sum(counted for counted, _ in measured)
        if measured
        else 0.0
    )


def steps_of(way: str) -> list[Step]:
    """Returns the steps that were measured or published of a way, "plain" or "compiled"."""

    def counted(row: Mapping[str, Any]) -> tuple[float, ...]:
        products = row["products"] / 1e3
        others = row["others"] / 1e3
        activations = row.get("activations", 0.0) / 1e3
        if way == "compiled":
            return products, others, row["operations"]
        others -= few(row)[0]
        return (
            products + others + activations,
            row["operations"] + KERNELS * row["convolutions"],
            1.0,
        )

    def few(row: Mapping[str, Any]) -> tuple[float, float]:
        counted, measured = row.get("few_channels", (0.0, 0.0))
        return counted / 1e3 * (way == "plain"), measured / 1e3 * (way == "plain")

    content = read_yaml(STEPS, STEPS.name)
    rows = [
        {"network": name, "card": H100, **row} for name, row in content["networks"].items()
    ] + content["published"]
    rows = [row for row in rows if way in row]
    factor = fitted(steps_of("plain"))[0] if way == "compiled" else 0.0
    return [
        Step(
            row["network"],
            row["card"],
            1 / row[way]["per_second"],
            row[way]["weight"],
            counted(row),
            few(row),
            factor * row.get("activations", 0.0) / 1e3,
        )
        for row in rows
    ]


def fitted(steps: Sequence[Step]) -> Numbers:
    """Returns the numbers of the formula."""
    shares = np.array([step.counted for step in steps]) / np.array(
        [[step.seconds] for step in steps]
    )
    factor = few_channels(steps)
    known = np.array([(factor * step.few[0] + step.activations) / step.seconds for step in steps])
    weights = np.sqrt([step.weight for step in steps])
    best = np.zeros(shares.shape[1])
    least = float("inf")
    for count in range(1, shares.shape[1] + 1):
        for columns in map(list, combinations(range(shares.shape[1]), count)):
            used = shares[:, columns]
            scale = weights
            # the squares of differences, weighed until they are those of logarithms
            for _ in range(40):
                numbers = np.linalg.lstsq(used * scale[:, None], scale * (1 - known), rcond=None)[0]
                ratios = np.maximum(used @ numbers + known, 1e-3)
                scale = weights * np.log(ratios) / np.where(ratios == 1, 1, ratios - 1)
            error = float(np.sum((weights * np.log(ratios)) ** 2))
            if error < least and not (numbers < 0).any():
                best = np.zeros(shares.shape[1])
                least = error
                best[columns] = numbers
    return best


def errors_of(steps: Sequence[Step]) -> dict[tuple[str, str], float]:
    """Returns, by network and card, the measured time over that by the other networks."""
    errors = {}
    for step in steps:
        if step.weight or step.card != H100:  # else it was measured, but tells nothing
            others = [other for other in steps if other.network != step.network]
            known = few_channels(others) * step.few[0] + step.activations
            predicted = float(fitted(others) @ step.counted) + known
            errors[step.network, step.card] = step.seconds / predicted
    return errors


def formula(way: str) -> dict[str, Any]:
    """Returns what gpu_constants.json holds of a way."""
    steps = steps_of(way)
    first, second, third = (float(f"{number:.3g}") for number in fitted(steps))
    errors = [error for (_, card), error in errors_of(steps).items() if card == H100]
    values = [first, second, second, third, 0.0, 0.0]
    if way == "plain":
        values = [
            first,
            first,
            float(f"{few_channels(steps):.3g}"),
            second,
            float(f"{KERNELS * second:.3g}"),
            third,
        ]
    band = [math.floor(100 * min(errors)) / 100, math.ceil(100 * max(errors)) / 100]
    names = (
        "products",
        "others",
        "few_channels",
        "operation_seconds",
        "convolution_seconds",
        "step_seconds",
    )
    return {**dict(zip(names, values, strict=True)), "band": band}


@program
def main() -> None:
    """Prints the errors and the formulas, and saves them."""
    PARSER.parse_args()
    formulas = {way: formula(way) for way in ("plain", "compiled")}
    for way, numbers in formulas.items():
        lines = ["| | | measured / predicted by the others |", "|---|---|--:|"]
        lines += [
            f"| {name} | {card} | {error:.2f} |"
            for (name, card), error in errors_of(steps_of(way)).items()
        ]
        print_table(f"{way}: {numbers}", lines)
    save("plan_fit", **formulas)
