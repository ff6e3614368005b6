"""Records golden files, checks them, and finds the commit that changed their numbers.

A verdict is a line for people and a test case for continuous integration.
"""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree

from trainer.base.errors import DONE, USER_MUST_CHANGE, UserError
from trainer.base.log import log
from trainer.base.settings.resolution import resolve
from trainer.base.settings.train_config import TrainConfig
from trainer.base.storage import write_whole
from trainer.proofs.golden_file import Golden, read_golden, recorded_steps, write_golden
from trainer.proofs.processes import measured
from trainer.proofs.verdicts import CHANGED, EQUAL, ROUNDING, TIMES_CONTROL, GoldenVerdict, causes, judge

Way = tuple[int, int]  # replicas of each worker, workers
# What `git bisect run` takes: 0 is good, 125 cannot be tested, every other code below 128 is bad.
_SCRIPT = """\
import subprocess, sys
code = subprocess.run([sys.executable, "-m", "trainer.golden", "check", sys.argv[1]]).returncode
sys.exit({0: 0, 2: 1}.get(code, 125))
"""


def record(out: Path, flags: Sequence[str], config: TrainConfig) -> None:
    """Measures a run and writes its golden file; one that agrees with it gets the bits of this processor beside."""
    steps, settings = recorded_steps(config.steps or 1), _settings(config)
    result = measured(flags, steps, control=True)
    bits = {step: moment["digest"] for step, moment in result["moments"].items()}
    digests: dict[str, Mapping[str, str]] = {result.pop("instructions"): bits}
    if out.exists():
        golden = read_golden(out)
        if golden.settings == settings and judge(golden, {**result, "instructions": ""}).kind != CHANGED:
            golden.digests |= digests
            write_golden(out, golden)
            log.info(f"{out} holds these numbers already: the bits of {', '.join(digests)} are added")
            return
    write_golden(out, Golden(list(flags), settings, steps, digests=digests, **result))
    log.info(f"{out}: steps {', '.join(map(str, steps))} of {config.model} are recorded")


def check(files: Sequence[Path], ways: Sequence[Way], junit: Path | None) -> int:
    """Prints a line for each file and writes the XML; returns the exit code."""
    failures: dict[str, str] = {}
    for file in files:
        golden = read_golden(file)
        try:
            settings = _settings(resolve(golden.flags).config)
            results = [measured(golden.flags, golden.steps, *way) for way in ways]
        except UserError as error:
            raise UserError(f"{file}: {error}") from None
        verdicts = [(way, judge(golden, result)) for way, result in zip(ways, results, strict=True)]
        line = described(verdicts, list(causes(golden, settings, results[0])))
        changed = any(verdict.kind == CHANGED for _, verdict in verdicts)
        failures[file.stem] = line if changed else ""
        (log.error if changed else log.info)("%s   %s", file.stem, line)
    if junit:
        write_whole(junit, _junit(failures))
    return USER_MUST_CHANGE if any(failures.values()) else DONE


def described(verdicts: Sequence[tuple[Way, GoldenVerdict]], differences: Sequence[str]) -> str:
    """Returns the line of one file: what changed, or else which ways gave equal bits and which rounding."""
    by_kind = {kind: [way for way, verdict in verdicts if verdict.kind == kind] for kind in (EQUAL, ROUNDING, CHANGED)}
    if by_kind[CHANGED]:
        verdict = next(verdict for _, verdict in verdicts if verdict.kind == CHANGED)
        where = verdict.reason or f"first in {verdict.tensor}, {verdict.times:.3g} times the control"
        ways = "" if len(by_kind[CHANGED]) == len(verdicts) else f" on {_named(by_kind[CHANGED])}"
        return f"{CHANGED}{ways} from step {verdict.step}, {where}; {', '.join(differences)}"
    parts = [f"{EQUAL} on {_named(by_kind[EQUAL])}"] if by_kind[EQUAL] else []
    if by_kind[ROUNDING]:
        times = max(verdict.times for _, verdict in verdicts)
        differing = ", ".join(part for part in differences if " differ: " in part)
        parts.append(
            f"{ROUNDING} on {_named(by_kind[ROUNDING])}: {times:.1f} of {TIMES_CONTROL:.0f} times what another order "
            f"of the rows does{f' ({differing})' if differing else ''}"
        )
    return "; ".join(parts)


def _named(ways: Sequence[Way]) -> str:
    """Returns `1 and 2 replicas and 2 workers`."""
    replicas, workers = [way[0] for way in ways if way[1] == 1], [way[1] for way in ways if way[1] > 1]
    counts = ((replicas, "replica"), (workers, "worker"))
    return " and ".join(
        f"{' and '.join(map(str, many))} {noun}{'s' * (many != [1])}" for many, noun in counts if many
    )  # fmt: skip


def _settings(config: TrainConfig) -> dict[str, Any]:
    """Returns the settings as JSON holds them."""
    settings: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return settings


def _junit(failures: Mapping[str, str]) -> str:
    counts = {"tests": str(len(failures)), "failures": str(sum(map(bool, failures.values())))}
    suite = ElementTree.Element("testsuite", {"name": "golden", **counts})
    for name, failure in failures.items():
        case = ElementTree.SubElement(suite, "testcase", classname="golden", name=name)
        if failure:
            ElementTree.SubElement(case, "failure", message=failure)
    return ElementTree.tostring(suite, encoding="unicode") + "\n"


def bisect(file: Path, good: str, bad: str) -> int:
    """Logs the first commit between `good` and `bad` with other numbers. Raises UserError where git refuses."""
    read_golden(file)
    if _git("status", "--porcelain", "--untracked-files=no"):
        raise UserError("the working tree has changes, which git bisect would overwrite: commit or stash them")
    with TemporaryDirectory(prefix="trainer-bisect-") as folder:
        golden = copyfile(file, Path(folder) / file.name)  # other commits have other golden files
        _git("bisect", "start", bad, good)
        try:
            lines = _git("bisect", "run", sys.executable, "-c", _SCRIPT, str(golden)).splitlines()
        finally:
            _git("bisect", "reset")
    first = next((line.split()[0] for line in lines if line.endswith("is the first bad commit")), "")
    if not first:
        raise UserError(f"git bisect found no commit: {lines[-1] if lines else 'it printed nothing'}")
    log.info(f"{file.stem}   {_git('log', '-1', '--format=%h %s', first)}: is the first with other numbers")
    return DONE


def _git(*words: str) -> str:
    process = subprocess.run(["git", *words], capture_output=True, text=True, check=False)
    if process.returncode:
        lines = (process.stderr or process.stdout).strip().splitlines()
        raise UserError(f"git {' '.join(words[:2])}: {lines[-1] if lines else 'it failed'}")
    return process.stdout.strip()
