"""Every rule says what comes out when an operation runs on two halves of a batch and on the
whole."""

import zlib
from typing import Any

from numpy.random import default_rng

from tests.fixtures import Patch, parametrize
from tests.trainer.proof.cases import CASES
from tests.trainer.proof.halves import labels_of
from trainer.proof import arithmetic
from trainer.proof.arithmetic import RULES
from trainer.proof.labels import Label

DRAWS = 8
KEPT = RULES["Identity"]


def wrong(name: str) -> list[Any]:
    """Returns what is labelled against the numbers in some calls of an operation; fails if nothing
    is labelled."""
    found = []
    labelled = 0
    for number in range(DRAWS):
        draw = default_rng([zlib.crc32(name.encode()), number])
        build, given = CASES[name](draw)
        for label, right in labels_of(build, given, draw):
            labelled += not label.is_bad
            if not right:
                found.append((number, [each.label for each in given], label))
    assert labelled, "no call of it has a label"
    return found


def test_every_rule_has_cases() -> None:
    assert set(RULES) - set(CASES) == set()


# All operations on lists have one case together.
@parametrize("name", sorted(name for name in CASES if "TensorList" not in name or "Stack" in name))
def test_the_numbers_are_what_the_label_says(name: str) -> None:
    assert wrong(name) == []


@parametrize(
    "name, rule",
    [
        ("Max", RULES["Sum"]),
        ("Mean", lambda node: arithmetic.summed(node)._replace(power=0)),
        ("Square", KEPT),
        ("Mul", RULES["Add"]),
        ("Cumsum", KEPT),
        ("ReverseV2", KEPT),
        ("MatMul", lambda node: node.label(0)),
        ("Reshape", lambda node: node.label(0)._replace(axis=0)),
        ("ConcatV2", KEPT),
        ("Split", lambda node: [node.label(1)] * 2),
        ("Slice", KEPT),
        ("GatherV2", lambda node: node.label(1)),
        ("Einsum", lambda node: Label("sum")),
    ],
)
def test_a_rule_that_is_wrong_fails(name: str, rule: Any, monkeypatch: Patch) -> None:
    monkeypatch.setitem(RULES, name, rule)
    monkeypatch.setattr("trainer.proof.node.Node.refuse_unread", lambda _: None)
    monkeypatch.setattr("trainer.proof.walk.fits", lambda *_: True)  # which catches many of them
    assert wrong(name)
