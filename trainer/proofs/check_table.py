"""Lays out what the check found as lines of text for a terminal."""

from collections.abc import Iterator, Sequence
from typing import Any

_HEADER = ("variant", "devices", "agrees", "weights", "losses", "gradients", "steps/s", "peak GiB", "first s")


def table(check: Any) -> Iterator[str]:
    """Yields the lines of a `trainer.proofs.on_gpus.GpuCheck`."""
    yield f"{check.model} on {check.data}, {check.batch}, on {', '.join(check.gpus or check.devices)}"
    lines = [_HEADER, *(_cells(row) for row in check.rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADER))]
    for line in lines:
        yield "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
    yield "each difference, and the most that it may be (docs/gpus.md)"
    yield from (f"left out: {line}" for line in check.left_out)
    yield from _rates(check)


def _cells(row: Any) -> Sequence[str]:
    far, speed = row.difference, row.speed
    cells = [row.name, str(row.devices), "no" if row.problem else "yes"]
    names = ("weights", "loss", "gradient")
    cells += [_within(getattr(far, name), getattr(far, f"most_{name}")) if far else "" for name in names]
    if speed is None:
        return [*cells, "", "", ""]
    peak = f"{max(speed.peak_device_memory_gib):.2f}" if speed.peak_device_memory_gib else "?"
    return [*cells, f"{speed.steps_per_second:.3g}", peak, f"{speed.first_call_seconds:.1f}"]


def _within(value: float, most: float | None) -> str:
    return f"{value:.0e}" + ("" if most is None else f" of {most:.0e}")


def _rates(check: Any) -> Iterator[str]:
    first = next((row.speed for row in check.rows if row.speed), None)
    if first:
        size, spent = first.state_bytes / 1e6, 1e3 * first.snapshot_seconds
        yield f"a checkpoint copies {size:,.1f} MB to the host in {spent:,.1f} ms"
    if check.all_reduces:
        yield f"all-reduces by {check.collective}:"
    for reduce in check.all_reduces:
        rate = reduce.bus_bytes_per_second / 1e9
        yield f"  {reduce.bytes / 1024:>10,.0f} KiB  {1e6 * reduce.seconds:>10,.0f} µs  {rate:>8.2f} GB/s on each link"
