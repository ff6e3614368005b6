"""Records golden files and checks them; a verdict is a line for people and a test case for continuous integration."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from trainer.base.errors import DONE, USER_MUST_CHANGE, UserError
from trainer.base.log import log
from trainer.base.settings.resolution import resolve
from trainer.base.settings.train_config import TrainConfig
from trainer.base.storage import write_whole
from trainer.proofs.golden_file import Golden, read_golden, recorded_steps, write_golden
from trainer.proofs.processes import measured
from trainer.proofs.verdicts import CHANGED, EQUAL, ROUNDING, TIMES_CONTROL, Verdict, causes, judge

Way = tuple[int, int]  # replicas of each worker, workers


def record(out: Path, flags: Sequence[str], config: TrainConfig) -> None:
    """Measures a run and writes its golden file; one that agrees with it gets the bits of this processor beside."""
    steps = recorded_steps(config.steps or 1)
    result = measured(flags, steps, control=True)
    digests = {str(step): result["moments"][str(step)]["digest"] for step in steps}
    if out.exists():
        before = read_golden(out)
        if before.settings == _settings(config) and judge(before, result).kind != CHANGED:
            before.digests[result["instructions"]] = digests
            write_golden(out, before)
            log.info(f"{out} holds these numbers already: the bits of {result['instructions']} are added")
            return
    parts = ("names", "sizes", "learning_rate", "moments", "control", "data", "sources", "packages")
    golden = Golden(
        flags=list(flags), settings=_settings(config), steps=steps, digests={result["instructions"]: digests},
        **{name: result[name] for name in parts},
    )  # fmt: skip
    write_golden(out, golden)
    log.info(f"{out}: steps {', '.join(map(str, steps))} of {config.model} are recorded")


def check(files: Sequence[Path], ways: Sequence[Way], junit: Path | None) -> int:
    """Prints a line for each file and writes the XML; returns the exit code."""
    lines, cases = [], []
    for file in files:
        verdicts, differences = _verdicts(file, ways)
        line, failed = described(verdicts, differences), any(verdict.kind == CHANGED for _, verdict in verdicts)
        lines.append(failed)
        cases.append((file.stem, line if failed else ""))
        (log.error if failed else log.info)("%s   %s", file.stem, line)
    if junit:
        write_whole(junit, _junit(cases))
    return USER_MUST_CHANGE if any(lines) else DONE


def _verdicts(file: Path, ways: Sequence[Way]) -> tuple[list[tuple[Way, Verdict]], str]:
    """Returns the verdict for each way, and what differs from the recorded run."""
    golden = read_golden(file)
    try:
        config = resolve(golden.flags).config
        results = [measured(golden.flags, golden.steps, *way) for way in ways]
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    verdicts = [(way, judge(golden, result)) for way, result in zip(ways, results, strict=True)]
    return verdicts, ", ".join(causes(golden, _settings(config), results[0]))


def described(verdicts: Sequence[tuple[Way, Verdict]], differences: str) -> str:
    """Returns the line of one file: what changed, or else which ways gave equal bits and which rounding."""
    by_kind: dict[str, list[Way]] = {}
    for way, verdict in verdicts:
        by_kind.setdefault(verdict.kind, []).append(way)
    if CHANGED in by_kind:
        verdict = next(verdict for _, verdict in verdicts if verdict.kind == CHANGED)
        where = verdict.reason or f"first in {verdict.tensor}, {verdict.times:.3g} times the control"
        ways = "" if len(by_kind) == 1 else f" on {_named(by_kind[CHANGED])}"
        return f"{CHANGED}{ways} from step {verdict.step}, {where}; {differences}"
    parts = [f"{EQUAL} on {_named(by_kind[EQUAL])}"] if EQUAL in by_kind else []
    if ROUNDING in by_kind:
        most = max(verdict.times for _, verdict in verdicts)
        told = [part for part in differences.split(", ") if " differ" in part]
        about = f" ({', '.join(told)})" if told else ""
        parts.append(f"{ROUNDING} on {_named(by_kind[ROUNDING])}: {most:.1f} of {TIMES_CONTROL:.0f} times what another "
                     f"order of the rows does{about}")  # fmt: skip
    return "; ".join(parts)


def _named(ways: Sequence[Way]) -> str:
    """Returns `1 and 2 replicas and 2 workers`."""
    replicas, workers = [way[0] for way in ways if way[1] == 1], [way[1] for way in ways if way[1] > 1]
    counts = ((replicas, "replica"), (workers, "worker"))
    named = [f"{' and '.join(map(str, many))} {noun}{'s' * (many != [1])}" for many, noun in counts if many]
    return " and ".join(named)


def _settings(config: TrainConfig) -> dict[str, Any]:
    """Returns the settings as JSON holds them."""
    settings: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return settings


def _junit(cases: Sequence[tuple[str, str]]) -> str:
    failures = sum(bool(failure) for _, failure in cases)
    suite = ElementTree.Element("testsuite", name="golden", tests=str(len(cases)), failures=str(failures))
    for name, failure in cases:
        case = ElementTree.SubElement(suite, "testcase", classname="golden", name=name)
        if failure:
            ElementTree.SubElement(case, "failure", message=failure)
    return ElementTree.tostring(suite, encoding="unicode") + "\n"
