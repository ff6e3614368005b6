"""Answers the rows of a file with an exported model: a file of answers, and one of errors, for each 10,000 lines.

A part appears whole, its errors before its answers, so the same command again goes on after the last part.
"""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.base.errors import UserError
from trainer.base.log import log
from trainer.base.storage import make_writable, output_address, write_whole
from trainer.base.storage.gcs import connect
from trainer.base.storage.local_files import Address, sha256_of
from trainer.run.served_model import BadRow, ServedModel

PART_ROWS = 10_000
_ANSWERS_OF = "answers_of.json"  # digests of the model's files and of the rows


def predict_rows(model: ServedModel, rows: Path, out: str) -> tuple[int, int]:
    """Writes OUT/predictions-00000.jsonl, … and OUT/errors-00000.jsonl, …; returns the counts of answers and errors.

    A line of answers is {"row": N, "prediction": …}, one of errors {"row": N, "error": "…"}; N counts lines from 0.
    """
    target = output_address(out, "out") or Path(out)
    if isinstance(target, Path):
        make_writable(target, "out")
    earlier, answered, failed, part = _names(target), 0, 0, -1
    _refuse_other_answers(target, earlier, {"model": dict(model.about.files), "rows": sha256_of(rows)}, out)
    log.info(f"{model.fixed_batch} rows a call")
    with rows.open("rb") as file:
        while lines := list(enumerate(itertools.islice(file, PART_ROWS), (part + 1) * PART_ROWS)):
            part += 1
            name = f"predictions-{part:05}.jsonl"
            if name in earlier:
                log.info(f"{name} is there")
                continue
            answers, errors = _answered(model, lines)
            if errors:
                _write(target, f"errors-{part:05}.jsonl", errors)
            _write(target, name, answers)
            answered, failed = answered + len(answers), failed + len(errors)
            log.info(f"{lines[-1][0] + 1:,} rows: {answered:,} answered, {failed:,} cannot be read")
    return answered, failed


def _answered(model: ServedModel, lines: Sequence[tuple[int, bytes]]) -> tuple[list[Any], list[Any]]:
    """Returns the lines of answers and of errors."""
    rows, answers, errors = [], [], []
    for number, line in lines:
        try:
            rows.append((number, model.row(json.loads(line))))
        except (BadRow, ValueError, RecursionError) as error:
            errors.append({"row": number, "error": str(error)})
    for at in range(0, len(rows), model.fixed_batch):
        numbers, batch = zip(*rows[at : at + model.fixed_batch], strict=True)
        for number, answer in zip(numbers, model.answers_or_errors(batch), strict=True):
            if isinstance(answer, BadRow):
                errors.append({"row": number, "error": str(answer)})
            else:
                answers.append({"row": number, "prediction": answer})
    return answers, sorted(errors, key=lambda error: error["row"])


def _refuse_other_answers(target: Path | Address, earlier: set[str], now: dict[str, Any], out: str) -> None:
    """Notes in the folder what its answers are of. Raises UserError if they are of another model or of other rows."""
    if _ANSWERS_OF not in earlier:
        _write(target, _ANSWERS_OF, [now])
        return
    try:
        before = json.loads(_read(target / _ANSWERS_OF))
        differing = [name for name in now if before[name] != now[name]]
    except (ValueError, KeyError, TypeError):
        differing = list(now)
    if differing:
        raise UserError(f"out={out}: its answers are of another {' and other '.join(differing)}: use another --out")


def _read(file: Path | Address) -> bytes:
    if isinstance(file, Path):
        return file.read_bytes()
    remote = connect().get(file)
    return connect().read(remote) if remote else b""


def _names(target: Path | Address) -> set[str]:
    if isinstance(target, Path):
        return {path.name for path in target.iterdir()}
    return {remote.address.name.rsplit("/", 1)[-1] for remote in connect().list(target)}


def _write(target: Path | Address, name: str, entries: Sequence[Any]) -> None:
    content = "".join(f"{json.dumps(entry)}\n" for entry in entries).encode()
    if isinstance(target, Path):
        write_whole(target / name, content)
    else:
        connect().upload(content, target / name)
