"""Tests that values are read alike from flags, Python calls and files, and that what is written is
read again."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures import parametrize
from tests.fuzz import examples
from tests.support import refused, resolved
from trainer.base.settings.fields import (
    Field,
    coerce,
    fields_of,
    read_flags,
    setting,
    value_type,
    write_flags,
)
from trainer.base.settings.model_settings import MODELS
from trainer.base.settings.request import Overrides

_SETTINGS = {**fields_of(MODELS["wgan_gp"].settings)}
_NAMED = {"recipe", "model", "data", "callbacks"}  # these decide which other settings there are
_TEXT = st.text(
    st.characters(min_codepoint=32, max_codepoint=0x2FFF, exclude_categories=("Cs", "Cc")),
    min_size=1,
)


def drawn(field: Field) -> st.SearchStrategy[Any]:
    """Returns a strategy for the values of a field."""
    rules = field.metadata
    kind, optional = value_type(field)
    low = rules["minimum"] if rules["above"] is None else rules["above"]
    numbers = {"min_value": low, "max_value": rules["maximum"]}
    exclusive = rules["above"] is not None
    value: st.SearchStrategy[Any]
    if kind is tuple:
        part = (
            st.sampled_from(rules["choices"])
            if rules["choices"]
            else _TEXT.filter(lambda text: "," not in text)
        )
        value = st.lists(part.map(str.strip).filter(bool)).map(tuple)
    elif kind is dict:
        value = st.dictionaries(st.integers(0, 99), st.floats(0, 100))
    elif rules["choices"]:
        value = st.sampled_from(rules["choices"])
    elif kind is bool:
        value = st.booleans()
    elif kind is int:
        value = st.integers(int(low or 0), int(rules["maximum"] or 10**6))
    elif kind is float:
        value = st.floats(**numbers, exclude_min=exclusive, allow_nan=False, allow_infinity=False)
    else:
        value = _TEXT.filter(lambda text: text.strip().lower() not in ("", "none"))
    return st.none() | value if optional else value


@examples(60)
@given(
    st.fixed_dictionaries(
        {}, optional={name: drawn(of) for name, of in _SETTINGS.items() if name not in _NAMED}
    )
)
def test_a_request_that_is_written_and_read_again_is_equal(values: dict[str, Any]) -> None:
    values = {"model": "wgan_gp", "steps": None, **values}
    request = Overrides.read(values)
    assert request.values == values
    assert Overrides.parse(request.arguments()).values == values


@dataclass(frozen=True, kw_only=True)
class Options:
    """Has a field of each kind."""

    names: tuple[str, ...] = setting((), "names")
    files: tuple[str, ...] = setting((), "files", repeated=True)
    pairs: Mapping[str, float] = setting({}, "pairs", repeated=True, above=0, metavar="NAME=VALUE")
    weights: Mapping[int, float] = setting({}, "weights", may_be_empty=True)
    text: str = setting("", "a text")
    cost: float | None = setting(None, "a cost", once=True)
    mode: str = setting("auto", "a mode", choices=("auto", "true", "false"))
    switch: bool = setting(False, "a switch")
    tiers: tuple[str, ...] = setting((), "tiers", positional=True)


FIELDS = fields_of(Options)


@parametrize(
    "name, value, expected",
    [
        ("names", ["a", "b"], ("a", "b")),
        ("names", "a, b,", ("a", "b")),
        ("files", "a,b", ("a,b",)),
        ("files", ["a", "b"], ("a", "b")),
        ("pairs", {"a": "1"}, {"a": 1.0}),
        ("pairs", ["a=1", "b=2"], {"a": 1, "b": 2}),
        ("weights", "0:1,1:6.5", {0: 1.0, 1: 6.5}),
        ("weights", {"0": 1}, {0: 1.0}),
        ("weights", "", {}),
        ("text", Path("a/b"), "a/b"),
        ("text", 5, "5"),
        ("text", ["a", "b"], "a,b"),
        ("cost", "1e3", 1000.0),
        ("cost", "None", None),
        ("mode", True, "true"),
        ("mode", "no", "false"),
        ("switch", "on", True),
        ("switch", 1, True),
    ],
)
def test_a_value_becomes_that_of_its_field(name: str, value: Any, expected: Any) -> None:
    assert coerce(FIELDS[name], value) == expected
    assert coerce(FIELDS[name], expected) == expected


@parametrize(
    "name, value, line",
    [
        ("names", 5, "names=5 must be one or several names, separated by commas"),
        (
            "pairs",
            "a",
            "pairs='a' must be pairs of a name and a value, each name once, written as NAME=VALUE",
        ),
        ("pairs", ["a=1", "a=2"], "each name once"),
        ("pairs", {"a": 0}, "pairs=a=0.0 must be above 0"),
        ("text", "", "text is empty: give a value"),
        ("text", "a\x00b", "must be text without control characters"),
        ("cost", [1], "cost=[1] must be a number"),
        ("cost", True, "cost=True must be a number"),
        ("mode", "atuo", "mode=atuo must be one of auto, true, false; did you mean 'auto'?"),
        ("switch", None, "switch=None"),
    ],
)
def test_a_value_that_does_not_fit_is_one_line(name: str, value: Any, line: str) -> None:
    with refused(line):
        coerce(FIELDS[name], value)


@parametrize(
    "words, texts",
    [
        (["a", "--switch", "b"], {"switch": "true", "tiers": ["a", "b"]}),
        (
            ["--no-switch", "a", "--files=x", "--files", "y"],
            {"switch": "false", "files": ["x", "y"], "tiers": ["a"]},
        ),
        (["--mode", "--text=x"], {"mode": "true", "text": "x"}),
        (["--text=--x"], {"text": "--x"}),
        (["--text=a", "--text=b"], {"text": "b"}),
    ],
)
def test_a_command_line_is_read(words: list[str], texts: dict[str, Any]) -> None:
    assert read_flags(words, FIELDS) == texts


@parametrize(
    "words, line",
    [
        (["--text", "--switch"], "--text has no value: write --text=VALUE"),
        (["--text"], "--text has no value"),
        (["--txet=a"], "unknown flag --txet; did you mean 'text'?"),
        (["-t"], "'-t' is not a flag: write --name=value"),
        (["--cost=1", "--cost=2"], "cost is given twice, as 1 and 2: give it once"),
        (["--tiers=a"], "unknown flag --tiers"),
    ],
)
def test_a_wrong_command_line_is_one_line(words: list[str], line: str) -> None:
    with refused(line):
        read_flags(words, FIELDS)


def test_flags_are_written_as_they_are_read() -> None:
    values = {
        "tiers": ("a", "b"),
        "files": ("x", "y"),
        "pairs": {"a": 1.0, "b": 2.0},
        "weights": {0: 1.0, 1: 6.5},
    }
    words = [
        "a",
        "b",
        "--files=x",
        "--files=y",
        "--pairs=a=1.0",
        "--pairs=b=2.0",
        "--weights=0:1.0,1:6.5",
    ]
    assert write_flags(values, FIELDS) == words
    assert {
        name: coerce(FIELDS[name], text) for name, text in read_flags(words, FIELDS).items()
    } == values


@parametrize(
    "flag, line",
    [
        (
            "--warmup_steps=30",
            "warmup_steps=30 and steps=20 contradict each other: the learning rate would never be",
        ),
        (
            "--patience=5",
            (
                "patience=5 has no effect without early_stopping: give --early_stopping too, or"
                " drop it"
            ),
        ),
        ("--fid_samples=9", "fid_samples=9 has no effect without fid_every_steps"),
        ("--sample_every_steps=9", "sample_every_steps=9: mlp generates no images: drop it"),
    ],
)
def test_a_setting_without_the_one_that_it_belongs_to_is_refused(flag: str, line: str) -> None:
    with refused(line):
        resolved("--model=mlp", "--steps=20", flag)
    assert (
        resolved("--recipe=efficientnet_photos", "--data=digits", "--early_stopping=").patience == 5
    )
