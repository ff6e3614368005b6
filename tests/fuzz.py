"""Hostile input by hypothesis: nasty values, how many examples, and what may come of each.

The examples are the same in every run; TRAINER_FUZZ_EXAMPLES=5000 tries at least so many of each
kind.
"""

import json
import os
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from trainer.base.errors import PlatformFault, UserError

MANY = int(os.environ.get("TRAINER_FUZZ_EXAMPLES", "0"))
Result = TypeVar("Result")

WORDS = (
    "",
    " ",
    ".",
    "..",
    "../../x",
    "/etc/x",
    "/",
    "~nobody-of-that-name/x",
    "a\nb",
    "a\0b",
    "a\\b",
    "\x1b[31m",
    "\ud800",
    "é\u0301",
    "\u202egpj",
    "１２",
    "<script>alert(1)</script>",
    "%s{0}$x",
    "x" * 300,
    "y/" * 3000,
    "gs://b/../x",
    "gs://",
    "nan",
    "-inf",
    "1e999",
    "1e3",
    "0x" + "f" * 50,
    "9" * 5000,
    "true",
    "null",
    "C:\\x",
    "folder:",
    "a:b",
    "-",
    "--x",
    "[/x]",
    "a[b]",
)
NUMBERS = (0, -1, 1, 2, 3, 8, 2**31 - 1, 2**31, 2**63, -(2**63), 10**30, 10**400)
REALS = (0.0, -0.0, 0.5, 1e-320, 1e308, -1e308, float("nan"), float("inf"), float("-inf"))

texts = st.sampled_from(WORDS) | st.text(max_size=20)
scalars = (
    st.none()
    | st.booleans()
    | st.sampled_from(NUMBERS)
    | st.integers()
    | st.sampled_from(REALS)
    | texts
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


def examples(quick: int) -> settings:
    """Stands above hypothesis's `given`: `quick` examples, or TRAINER_FUZZ_EXAMPLES if more."""
    return settings(
        max_examples=max(MANY, quick),
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def one_line(call: Callable[[], Result]) -> Result | None:
    """What `call` returns; None where it refuses in one line. Whatever else it raises is a
    fault."""
    try:
        return call()
    except (UserError, PlatformFault) as error:
        line = str(error)
        assert line.isprintable(), f"not one plain line: {line!r}"
        assert len(line) < 5000
        return None


@contextmanager
def at_most(mib: float) -> Iterator[None]:
    """Python and NumPy ask for no more than `mib` MiB of memory in the block, touched or not."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()
    assert peak < mib, f"{peak:,.0f} MiB were asked for, {mib} are allowed"


def like(sample: Any) -> st.SearchStrategy[Any]:
    """JSON values like `sample`, in which any part may be missing or be something else."""
    part: st.SearchStrategy[Any]
    if isinstance(sample, dict):
        part = st.fixed_dictionaries(
            {}, optional={key: like(value) for key, value in sample.items()}
        )
    elif isinstance(sample, list):
        part = (
            st.lists(st.sampled_from(sample).flatmap(like), max_size=3) if sample else st.just([])
        )
    else:
        part = st.just(sample)
    return st.one_of(part, part, part, part, part, values)


def json_like(sample: Any) -> st.SearchStrategy[bytes]:
    """Files that should hold JSON like `sample`: near it, cut short, or anything."""
    near = like(sample).map(lambda value: json.dumps(value).encode())
    cut = st.builds(lambda content, end: content[:end], near, st.integers(0, 400))
    other = st.sampled_from([b"[" * 100_000, b"\xff\xfe", b"null"])
    return st.one_of(near, near, near, cut, st.binary(max_size=60), other)


def damaged(content: bytes) -> st.SearchStrategy[bytes]:
    """`content` with some of its bytes changed, taken out or put in, or cut short; most often near
    its beginning."""
    place = st.integers(0, min(len(content), 64)) | st.integers(0, len(content))
    extremes = st.sampled_from(
        [b"\0", b"\xff", b"\x7f", b"\x80\0\0\0", b"\xff\xff\xff\xff\xff\xff\xff\x7f"]
    )
    edit = st.tuples(place, st.integers(0, 8), extremes | st.binary(max_size=8))

    def edited(edits: list[tuple[int, int, bytes]], end: int | None) -> bytes:
        result = content
        for at, gone, new in edits:
            result = result[:at] + new + result[at + gone :]
        return result[:end]

    return st.builds(edited, st.lists(edit, max_size=4), st.none() | place)
