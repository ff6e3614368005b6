"""Answers a file of rows, and writes predictions-00000.jsonl, … and errors-00000.jsonl, ….

Each 10,000 lines get a file of answers, and one of errors if there are any. Files appear whole,
errors before answers, so the same command again goes on after the last file of answers.
"""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.base.errors import UserError
from trainer.base.log import log
from trainer.base.run_files.job_files import mapping
from trainer.base.storage import make_writable, output_address, write_whole
from trainer.base.storage.gcs import connect
from trainer.base.storage.local_files import Address, sha256_of
from trainer.run.served_model import BadRow, ServedModel

PART_ROWS = 10_000
# This file says by digests which model and rows the answers in the folder belong to.
_ANSWERS_OF = "answers_of.json"


def predict_rows(model: ServedModel, rows: Path, out: str) -> tuple[int, int]:
    """Writes OUT/predictions-00000.jsonl, … and OUT/errors-00000.jsonl, ….

    Returns the numbers of answers and errors. A line is {"row": N, "prediction": …} or {"row": N,
    "error": "…"}; N counts the lines of `rows` from 0. Raises UserError if `out` is no folder's
    name, or holds answers of another model or other rows.
    """
    if "." in Path(out).name:
        raise UserError(
            f"out={out}: it becomes a folder of several files: use a name without a dot"
        )
    target = output_address(out, "out") or Path(out)
    if isinstance(target, Path):
        make_writable(target, "out")
        earlier = {path.name for path in target.iterdir()}
    else:
        earlier = {remote.address.name.rsplit("/", 1)[-1] for remote in connect().list(target)}

    # Answers of another model or of other rows must not be mixed with those in the folder.
    about = {"model": dict(model.about.files), "rows": sha256_of(rows)}
    if _ANSWERS_OF not in earlier:
        _write(target, _ANSWERS_OF, [about])
    else:
        try:
            before = mapping({"answers": json.loads(_read(target / _ANSWERS_OF))}, "answers")
        # Nobody knows whose answers these are if the file is damaged.
        except ValueError:
            before = {}
        differing = [name for name in about if before.get(name, False) != about[name]]
        if differing:
            raise UserError(
                f"out={out}: its answers differ from these in {' and '.join(differing)}: use"
                " another --out"
            )

    # Each part of the rows has a file of answers, written last: a part that has it is done.
    answered = 0
    failed = 0
    part = 0
    with rows.open("rb") as file:
        while lines := list(enumerate(itertools.islice(file, PART_ROWS), part * PART_ROWS)):
            name = f"predictions-{part:05}.jsonl"
            error_name = f"errors-{part:05}.jsonl"
            if name in earlier:
                log.info(f"{name} is there")
                errors = _read(target / error_name).splitlines() if error_name in earlier else []
                answers = lines[len(errors) :]
            else:
                answers, errors = _answer_lines(model, lines)
                if errors:
                    _write(target, error_name, errors)
                _write(target, name, answers)
            part += 1
            answered += len(answers)
            failed += len(errors)
            log.info(f"{lines[-1][0] + 1:,} rows: {answered:,} answered, {failed:,} not")
    return answered, failed


def _answer_lines(
    model: ServedModel, lines: Sequence[tuple[int, bytes]]
) -> tuple[list[Any], list[Any]]:
    """Answers numbered lines of JSON.

    Returns the entries of the file of answers and of the file of errors.
    """
    # The lines that are no JSON are errors, and the others are the instances of a request.
    numbers = []
    instances = []
    results = {}
    for number, line in lines:
        try:
            instances.append(json.loads(line))
            numbers.append(number)
        except (ValueError, RecursionError) as error:
            results[number] = BadRow(str(error))
    blocks, bad = model.parse(instances)
    results |= {numbers[place]: error for place, error in bad.items()}
    for places, columns in blocks:
        for begin in range(0, len(places), model.most_rows):
            part = tuple(column[begin : begin + model.most_rows] for column in columns)
            part_numbers = [numbers[place] for place in places[begin:]]
            results |= zip(part_numbers, model.answer(part), strict=False)
    answers: list[Any] = []
    errors = []
    for row, value in sorted(results.items()):
        if isinstance(value, BadRow):
            errors.append({"row": row, "error": str(value)})
        else:
            answers.append({"row": row, "prediction": value})
    return answers, errors


def _read(file: Path | Address) -> bytes:
    """Returns the content of a file; b"" if it is remote and does not exist."""
    if isinstance(file, Path):
        return file.read_bytes()
    remote = connect().get(file)
    return connect().read(remote) if remote else b""


def _write(target: Path | Address, name: str, entries: Sequence[Any]) -> None:
    """Writes a whole file of JSON Lines to a folder that is local or at gs://."""
    content = "".join(f"{json.dumps(entry)}\n" for entry in entries).encode()
    if isinstance(target, Path):
        write_whole(target / name, content)
    else:
        connect().upload(content, target / name)
