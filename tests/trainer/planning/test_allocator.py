"""Tests the model of TensorFlow's allocator by what it must do, and the lines of memory by allocations made up here."""

import random

import pytest

from benchmarks.plan_memory import limits_of
from trainer.base.errors import UserError
from trainer.base.run_files.plan_file import Line, largest_rows, peak_of
from trainer.planning.allocator import Allocator
from trainer.planning.peaks import Allocation, PeakMemory, Trace, peak_bytes, sizes, upper_envelope
from trainer.planning.planner import larger

MIB = 2**20


def test_a_piece_is_given_again_and_a_rest_below_half_of_it_is_not_split_off() -> None:
    allocator = Allocator()
    first = allocator.allocate(300)
    assert first is not None
    assert allocator.held == 512
    allocator.free(first)
    assert allocator.allocate(100) == first
    assert allocator.held == 256
    large = allocator.allocate(MIB)
    assert large is not None
    allocator.free(large)
    assert allocator.held == 256
    assert allocator.allocate(MIB * 3 // 4) == large
    assert allocator.held == 256 + MIB * 3 // 4 or allocator.held == 256 + MIB  # joined with what follows, or whole


def test_regions_double_and_their_parts_are_never_joined() -> None:
    allocator = Allocator(limit=6 * MIB)
    assert allocator.allocate(3 * MIB // 2) is not None  # of a region of 2 MiB
    assert allocator.allocate(3 * MIB // 2) is not None  # of one of 4 MiB
    assert allocator.allocate(3 * MIB) is None  # 3 MiB are free, in two regions
    assert allocator.allocate(2 * MIB) is not None


def test_all_that_is_freed_is_one_piece_again() -> None:
    allocator, draw = Allocator(), random.Random(0)
    allocator.free(allocator.allocate(64 * MIB) or 0)
    live: list[int] = []
    for _ in range(3_000):
        if live and draw.random() < 0.5:
            allocator.free(live.pop(draw.randrange(len(live))))
        else:
            live.append(allocator.allocate(draw.randrange(1, 100_000)) or 0)
    assert len(set(live)) == len(live)
    while live:
        allocator.free(live.pop())
    assert allocator.held == 0
    limited = Allocator(limit=64 * MIB)
    assert limited.allocate(64 * MIB) is not None
    assert limited.allocate(1) is None


def trace(rows: int) -> Trace:
    """A step with 1,024 bytes a row, a kernel's temporary, and a tensor that a small batch has under another name."""
    made = [
        Allocation("", "", 4096, 1), Allocation("while/Conv2D", "output", 1024 * rows, 1),
        Allocation("while/Conv2D", "temp", 100_000, 1),
        Allocation(f"while/call_{rows}/Relu", "output", 512 * rows, 1), Allocation("while/Sum", "output", 2048, 9),
    ]  # fmt: skip
    return Trace(rows, made, [0, 1, 2, ~2, 3, ~1, 4, ~4, ~3], 1)


def test_lines_follow_from_two_traces_and_hold_at_a_third() -> None:
    found = PeakMemory(trace(8), trace(16), 10_000)
    for rows in (8, 16, 64, 1000):
        assert peak_of(found.device_lines(), rows) == peak_bytes(trace(rows), 10_000, temporaries=False)
        assert peak_of(found.cpu_lines(), rows) == peak_bytes(trace(rows), 10_000, temporaries=True)
    assert [line.per_row for line in sizes(trace(8), trace(16))] == [0, 1024, 0, 512, 0]
    half = found.device_lines(half=True)
    assert peak_of(half, 64) == 15_000 + 64 * (1024 + 512) / 2
    low, high = limits_of(found, 64)
    assert peak_of(found.cpu_lines(), 63) - 10_000 <= low <= high < 2 * MIB  # the state is not in the traces


def test_only_lines_that_are_the_largest_somewhere_are_kept() -> None:
    lines = upper_envelope([Line(100, 1), Line(0, 10), Line(50, 1), Line(60, 4), Line(10, 5), Line(100, 0.5)])
    assert lines == [Line(100, 1), Line(0, 10)]
    assert [peak_of(lines, rows) for rows in (1, 11, 12)] == [101, 111, 120]
    assert largest_rows(lines, 111) == 11
    assert largest_rows(lines, 100) == 0


@pytest.mark.parametrize("limit", [1, 2**40])
def test_the_most_rows_of_a_limit_are_within_it(limit: int) -> None:
    lines = [Line(2.0**30, 1e6)]
    rows = largest_rows(lines, limit)
    assert rows == 0 or peak_of(lines, rows) <= limit < peak_of(lines, rows + 1)


@pytest.mark.parametrize(("flops", "needed", "expected"), [
    (1, 2**20, [32, 64]), (10**11, 2**20, [16, 32]), (1, 2**30, [16, 32]),
])  # fmt: skip
def test_a_plan_runs_as_many_rows_as_time_and_memory_allow(flops: int, needed: int, expected: list[int]) -> None:
    assert larger(flops, needed, 10 * 2**30) == expected
    with pytest.raises(UserError, match=r"a step with 32 rows needs up to 16\.0 GiB, this machine has 10\.0: make "):
        larger(flops, 2 * 2**30, 10 * 2**30)
