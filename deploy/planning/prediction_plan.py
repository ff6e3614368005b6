"""Plans a prediction before it is paid for: its time from a batch measured here, or from a run, and its cost."""

import math
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from deploy.planning.extrapolation import is_of
from deploy.planning.forecast import START_SECONDS
from deploy.planning.interval import Interval
from deploy.planning.strategy_costs import offers
from deploy.report.collection import collect
from deploy.report.measures import summarize
from deploy.tiers.machine_table import load_machines
from deploy.tiers.output import error_of_program
from deploy.tiers.tier import Tier
from deploy.vertex import buckets
from deploy.vertex.spending import format_duration
from trainer.base.errors import UserError
from trainer.base.run_files.records import positive, read_json
from trainer.base.run_files.run_layout import SPEED
from trainer.base.run_files.serving_file import FIXED_BATCH

_MEASURED_ROWS = 256
# Guesses. Of rows whose lines were not all read; of the time of another CPU, and of a GPU, over that of this CPU.
_COUNT_DOUBT = Interval(0.8, 1.0, 1.25)
_OTHER_CPU, _GPU = Interval(0.5, 1.0, 2.0), Interval(0.01, 0.2, 2.0)
# Of a training step a call of the model does a third at least, the forward pass, and no more than all.
_SHARE = Interval(1 / 3, 1 / math.sqrt(3), 1.0)
_PARSING_SECONDS_PER_BYTE = Interval(1e-8, 3e-8, 1e-7)  # of a line of JSON, on one core


@dataclass(frozen=True)
class RowFile:
    """Holds what is known of a file of rows: its first lines, how many there are, and the bytes of one."""

    name: str
    lines: list[bytes]
    count: Interval
    bytes_a_row: float

    @classmethod
    def read(cls, address: str) -> "RowFile":
        """Reads the first lines of an object. Raises UserError if there is none."""
        text, size = buckets.read_first(address)
        lines = text.splitlines() if len(text) == size else text.splitlines()[:-1]
        if not lines and size:
            raise UserError(f"rows={address}: its first row is longer than 8 MiB: leave out --plan and --from")
        if not lines:
            raise UserError(f"rows={address}: it has no line of JSON")
        mean = (len(b"".join(lines)) + len(lines)) / len(lines)
        doubt = Interval(1.0, 1.0, 1.0) if len(text) == size else _COUNT_DOUBT.times(size / mean / len(lines))
        return cls(address, lines, doubt.times(len(lines)), mean)


def seconds_measured_here(artifact: str, rows: RowFile, tier: Tier) -> Interval:
    """Returns the seconds of a row on the tier, by those on this machine's CPU, in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="trainer-predict-") as folder:
        sample, out = Path(folder, "rows.jsonl"), Path(folder, "out")
        sample.write_bytes(b"\n".join(rows.lines[:_MEASURED_ROWS]))
        command = [sys.executable, "-m", "trainer.predict", artifact, f"--rows_file={sample}", f"--out={out}"]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
        trial = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        speed, _ = read_json(out / SPEED)
    seconds, count = positive(speed.get("seconds")), positive(speed.get("rows"))
    if not (seconds and count):
        if trial.returncode:
            raise error_of_program(trial.stdout.splitlines(), trial.returncode, "python -m trainer.predict")
        raise UserError(f"python -m trainer.predict could read none of {rows.name}'s first: leave out --plan")
    return (_GPU if tier.accelerators else _OTHER_CPU).times(seconds / count)


def seconds_by_run(run: str, rows: RowFile, tier: Tier) -> Interval:
    """Returns the seconds of a row on the tier by the training steps of a run on devices of its kind."""
    summaries = [row for row in summarize(collect([run])) if row.step_seconds and is_of(tier, row)]
    if not summaries:
        raise UserError(f"from={run}: no step was timed there on {tier.kind}: use --plan, which measures here")
    summary = summaries[0]
    batch = positive(summary.runs[0].config.get("global_batch_size"))
    if not batch:
        raise UserError(f"from={run}: its batch is not known, as that of a script: use --plan, which measures here")
    share = FIXED_BATCH * summary.devices / batch  # of the rows of a step; a call with fewer may take as long
    call = Interval(min(1.0, share), math.sqrt(share), max(1.0, share)).times(summary.step_seconds.median)
    return call.product(_SHARE).times(1 / FIXED_BATCH).plus(_PARSING_SECONDS_PER_BYTE.times(rows.bytes_a_row))


def prediction_plan(
    tier: Tier, artifact: str, address: str, run: str, max_cost: float | None
) -> tuple[str, Interval | None]:
    """Returns a line with the time and the cost of a prediction, and its USD, None if they are not known.

    run: whose speed is taken, if not measured here. Raises UserError if it is likely to cost more than `max_cost` USD.
    """
    rows = RowFile.read(address)
    a_row = seconds_by_run(run, rows, tier) if run else seconds_measured_here(artifact, rows, tier)
    seconds = rows.count.product(a_row).plus(START_SECONDS)
    offered = {offer.strategy: offer for offer in offers(tier, load_machines(), seconds, seconds.middle / 2)}
    basis = f"by {run}" if run else f"by {min(len(rows.lines), _MEASURED_ROWS)} rows here"
    estimate = f"{rows.count.middle:,.0f} rows, {basis}: {_times(seconds)}"
    offer = offered.get(tier.strategy)
    if offer is None:
        return f"plan: {estimate}; the cost is not known", None
    estimate += f", {offer.usd.middle:.2f} USD ({offer.usd.low:.2f} - {offer.usd.high:.2f})"
    if max_cost is not None and offer.usd.middle > max_cost:
        raise UserError(f"max_cost={max_cost:g}: the job would be stopped before its end: {estimate}: raise "
                        "--max_cost, or split the file of rows")  # fmt: skip
    warned = max_cost is not None and offer.usd.high > max_cost
    return f"plan: {estimate}{'; it may be stopped before its end' if warned else ''}", offer.usd


def _times(seconds: Interval) -> str:
    return f"{format_duration(seconds.middle)} ({format_duration(seconds.low)} - {format_duration(seconds.high)})"
