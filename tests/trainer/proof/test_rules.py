"""Every rule says what comes out when an operation runs on two halves of a batch and on the whole."""

import zlib
from typing import Any

import numpy as np
import pytest

from tests.fixtures import Patch
from tests.trainer.proof.cases import CASES
from tests.trainer.proof.halves import labels_of
from trainer.proof import arithmetic, places
from trainer.proof.labels import Label

DRAWS = 12


def wrong(name: str) -> list[Any]:
    """Returns what is labelled against the numbers in some calls of an operation; fails if nothing is labelled."""
    found, labelled = [], 0
    for number in range(DRAWS):
        draw = np.random.default_rng([zlib.crc32(name.encode()), number])
        build, given = CASES[name](draw)
        for label, right in labels_of(build, given, draw):
            labelled += not label.is_bad
            if not right:
                found.append((number, [each.label for each in given], label))
    assert labelled, "no call of it has a label"
    return found


def test_every_rule_has_cases() -> None:
    assert set(arithmetic.RULES) - set(CASES) == set()


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_numbers_are_what_the_label_says(name: str) -> None:
    assert wrong(name) == []


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("Max", arithmetic.reduced),
        ("Mean", lambda node: arithmetic.reduced(node)._replace(power=0)),
        ("Square", arithmetic.kept),
        ("Exp", arithmetic.kept),
        ("Mul", arithmetic.added),
        ("Cumsum", arithmetic.kept),
        ("ReverseV2", arithmetic.kept),
        ("Roll", arithmetic.kept),
        ("Transpose", arithmetic.kept),
        ("MatMul", lambda node: node.labels[0]),
        ("Reshape", arithmetic.kept),
        ("ConcatV2", arithmetic.kept),
        ("Split", lambda node: [node.labels[1]] * 2),
        ("Slice", arithmetic.kept),
        ("StridedSliceGrad", lambda node: node.labels[4]),
        ("Tile", arithmetic.kept),
        ("L2Loss", lambda node: Label("sum")),
        ("RealDiv", arithmetic.product),
        ("GatherV2", lambda node: node.labels[1]),
        ("Softmax", arithmetic.kept),
        ("Einsum", lambda node: Label("sum")),
    ],
)
def test_a_rule_that_is_wrong_fails(name: str, rule: Any, monkeypatch: Patch) -> None:
    monkeypatch.setitem(arithmetic.RULES, name, rule)
    monkeypatch.setattr("trainer.proof.walk.fits", lambda *_: True)  # which catches many of them
    assert wrong(name)


def test_settings_are_those_of_operations_with_rules() -> None:
    assert set(places.SETTINGS) <= {*arithmetic.RULES, "BroadcastGradientArgs"}
