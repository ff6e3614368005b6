"""Keeps the numbers of a run's first steps in a file, and tells later whether they are still the same.

  python -m trainer.golden record --recipe=mine.yaml --steps=30 --out=golden/mine.json
  python -m trainer.golden check golden/*.json [--replicas=1,2] [--workers=1,2] [--junit=out.xml]

`record` takes the flags of python -m trainer.task. It trains in float64 with at most 16 rows a batch, and built-in
models with width 8 at most, unless a flag says otherwise. Each verdict is one line: equal bits; rounding, within three
times what another order of the rows does; or CHANGED, from which step, in which tensor, and what else differs.

Exit codes: 0 nothing has changed; 2 something has, or you must change something; 1 a fault of this package or of the
platform."""

import dataclasses
import json
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree

from trainer.base.errors import DONE, USER_MUST_CHANGE, PlatformFault, UserError
from trainer.base.log import log, set_verbose
from trainer.base.run_files.job_files import read_json
from trainer.base.settings.fields import VERBOSE, Usage, parse_options, setting
from trainer.base.settings.own_settings import refuse_missing_modules
from trainer.base.settings.request import parse_request, resolve
from trainer.base.settings.train_config import TrainConfig
from trainer.base.storage import write_whole
from trainer.checks.golden_file import (
    CHANGED,
    EQUAL,
    METRICS,
    ROUNDING,
    TIMES_CONTROL,
    Golden,
    GoldenVerdict,
    causes,
    compare_with_golden,
    read_golden,
    recorded_steps,
    write_golden,
)
from trainer.user_code.command import command, last_error, quiet_start, start_command

_DEFAULT_STEPS = 30  # if no flag gives the run's length
# Settings of a recorded run that no flag names; the numbers are upper limits.
_SMALL = {"precision": "float64", "global_batch_size": 16, "width": 8}
_LONGEST_SECONDS = 1_800.0  # after which a measuring process counts as hung
_MEASURE = "measure"  # the internal verb of a measuring process


@command("starts from scratch")
def main(arguments: Sequence[str]) -> int:
    """Runs the verb that comes first, and returns the exit code. Raises UserError for an unknown verb."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return DONE
    verbs = {"record": record, "check": check, _MEASURE: measure_here}
    if arguments[0] not in verbs:
        raise UserError(f"{arguments[0]!r} is no verb of trainer.golden: use record or check")
    return verbs[arguments[0]](arguments[1:])


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordOptions:
    """Holds the options of `record` that are not settings of a run."""

    out: str = setting(meaning="the golden file", metavar="FILE")
    verbose: bool = VERBOSE


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Holds the options of `check`."""

    files: tuple[str, ...] = setting(meaning="golden files", metavar="FILE", positional=True)
    replicas: tuple[str, ...] = setting(("1",), "numbers of replicas", metavar="1,2")
    workers: tuple[str, ...] = setting(("1",), "numbers of workers, with one replica each", metavar="1,2")
    junit: str = setting("", "the verdicts as JUnit's XML", metavar="FILE")


RECORD = Usage("python -m trainer.golden record", "--recipe=NAME --out=FILE [--setting=value …]", __doc__)
CHECK = Usage("python -m trainer.golden check", "FILE … [--replicas=1,2]", __doc__)


def _counts(texts: Sequence[str]) -> list[int]:
    """Returns whole numbers from 1 on. Raises UserError for any other text."""
    for text in texts:
        if not text.isdecimal() or not int(text):
            raise UserError(f"{text!r} is not a whole number from 1 on: write 1,2")
    return [*map(int, texts)]


def record(arguments: Sequence[str]) -> int:
    """Measures a run and writes its golden file; returns the exit code.

    If the file exists and agrees with the run, only the digests of this processor's bits are added to it.
    """
    request = parse_request(RecordOptions, arguments, RECORD)
    set_verbose(request.options.verbose)
    overrides = request.overrides
    settings_of_user = vars(request.config)
    # A small run, unless a flag names its length or a size.
    small = {
        name: value if isinstance(value, str) else min(value, settings_of_user[name])
        for name, value in _SMALL.items()
        if name in settings_of_user and name not in overrides.values
    }
    if not {"steps", "epochs"} & overrides.values.keys():
        small["steps"] = _DEFAULT_STEPS
    flags = overrides.replace(**small).arguments()
    out_file = request.options.out
    config = resolve(flags).config
    refuse_missing_modules(config)
    out, steps, settings = Path(out_file), recorded_steps(config.steps or 1), _settings(config)
    result = measure_in_processes(flags, steps, control=True)
    bits = {step: moment["digest"] for step, moment in result["moments"].items()}
    digests: dict[str, Mapping[str, str]] = {result.pop("instructions"): bits}
    if out.exists():
        golden = read_golden(out)
        without_bits = {**result, "instructions": ""}  # the file may lack this processor's digests
        same = golden.settings == settings and not next(causes(golden, settings, without_bits)).startswith(METRICS)
        if same and compare_with_golden(golden, without_bits).kind != CHANGED:
            golden.digests |= digests
            write_golden(out, golden)
            log.info(f"{out} holds these numbers already: the bits of {', '.join(digests)} are added")
            return DONE
    write_golden(out, Golden(flags, settings, steps, digests=digests, **result))
    log.info(f"{out}: steps {', '.join(map(str, steps))} of {config.model} are recorded")
    return DONE


def _settings(config: TrainConfig) -> dict[str, Any]:
    """Returns the settings as they read after a round trip through JSON, for comparison with a golden file."""
    return dict(json.loads(json.dumps(dataclasses.asdict(config))))


def check(arguments: Sequence[str]) -> int:
    """Repeats the run of each golden file, logs one line a file, writes --junit, and returns the exit code."""
    options = parse_options(CheckOptions, arguments, CHECK)
    ways: dict[str, dict[str, Any]] = {f"replicas={count}": {"replicas": count} for count in _counts(options.replicas)}
    ways |= {f"workers={count}": {"workers": count} for count in _counts(options.workers) if count > 1}
    failures: dict[str, str] = {}
    for file in map(Path, options.files):
        golden = read_golden(file)
        try:
            settings = _settings(resolve(golden.flags).config)
            results = [measure_in_processes(golden.flags, golden.steps, **way) for way in ways.values()]
        except UserError as error:
            raise UserError(f"{file}: {error}") from None
        verdicts = {way: compare_with_golden(golden, result) for way, result in zip(ways, results, strict=True)}
        line = line_of(verdicts, list(causes(golden, settings, results[0])))
        changed = any(verdict.kind == CHANGED for verdict in verdicts.values())
        failures[file.stem] = line if changed else ""
        (log.error if changed else log.info)("%s   %s", file.stem, line)
    if options.junit:
        counts = {"tests": str(len(failures)), "failures": str(sum(map(bool, failures.values())))}
        suite = ElementTree.Element("testsuite", {"name": "golden", **counts})
        for name, failure in failures.items():
            case = ElementTree.SubElement(suite, "testcase", classname="golden", name=name)
            if failure:
                ElementTree.SubElement(case, "failure", message=failure)
        write_whole(Path(options.junit), ElementTree.tostring(suite, encoding="unicode") + "\n")
    return USER_MUST_CHANGE if any(failures.values()) else DONE


def line_of(verdicts: Mapping[str, GoldenVerdict], differences: Sequence[str]) -> str:
    """Returns the line about one file: what changed, or else on which replicas and workers bits or rounding agree.

    verdicts: by the flag of the repeated run, such as `replicas=2`; each is measured by the control, which is what
    another order of the rows changes. differences: lines on what is not as when the file was recorded, from `causes`.
    """
    by_kind = {kind: [way for way in verdicts if verdicts[way].kind == kind] for kind in (EQUAL, ROUNDING, CHANGED)}
    if by_kind[CHANGED]:
        verdict = verdicts[by_kind[CHANGED][0]]
        where = verdict.reason or f"first in {verdict.tensor}, {verdict.times:.3g} times the control"
        ways = ", ".join(by_kind[CHANGED])
        return f"{CHANGED} on {ways} from step {verdict.step}, {where}; {', '.join(differences)}"
    parts = [f"{kind} on {', '.join(ways)}" for kind, ways in by_kind.items() if ways]
    if by_kind[ROUNDING]:
        times = max(verdict.times for verdict in verdicts.values())
        parts.append(f"{times:.1f} of {TIMES_CONTROL:.0f} times what another order of the rows does")
        parts += [difference for difference in differences if " differ: " in difference]
    else:
        parts += [difference for difference in differences if difference.startswith(METRICS)]
    return "; ".join(parts)


def measure_in_processes(
    flags: Sequence[str], steps: Sequence[int], replicas: int = 1, workers: int = 1, *, control: bool = False
) -> dict[str, Any]:
    """Runs the given flags of trainer.task on the CPU, and returns what `trainer.checks.golden_run.measure` writes.

    Each run has processes of its own, because TensorFlow fixes the number of devices when it starts: one process, or
    one for each worker of a cluster on loopback. If one fails or takes too long, all are killed.
    Raises UserError with the error line of a process that the user must change, PlatformFault for any other failure.
    """
    environments: list[dict[str, str]] = [{}]
    if workers > 1:  # on free ports, found by binding and closing them
        listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(workers)]
        cluster = {"worker": [f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]}
        for listener in listeners:
            listener.close()
        tasks = ({"cluster": cluster, "task": {"type": "worker", "index": index}} for index in range(workers))
        environments = [{"TF_CONFIG": json.dumps(task)} for task in tasks]
    with TemporaryDirectory(prefix="trainer-golden-") as name:
        folder, processes = Path(name), list[subprocess.Popen[bytes]]()
        out, logs = folder / "measured.json", [folder / f"log-{index}" for index in range(workers)]
        options = json.dumps({"steps": steps, "replicas": replicas, "out": str(out), "control": control})
        words = ["trainer.golden", _MEASURE, options, *flags]
        try:
            for file, environment in zip(logs, environments, strict=True):
                processes.append(start_command(words, file, environment))
            for file, process in zip(logs, processes, strict=True):
                if code := process.wait(_LONGEST_SECONDS):
                    line = last_error(file)
                    if code == UserError.exit_code:
                        raise UserError(line)
                    raise PlatformFault(f"a measuring process ended with exit code {code}: {line}")
        except subprocess.TimeoutExpired:
            raise PlatformFault(f"a measuring process took longer than {_LONGEST_SECONDS:.0f} s") from None
        finally:
            for process in processes:
                process.kill()
                process.wait()
        content, problem = read_json(out)
    if problem:
        raise PlatformFault(f"a measuring process left no result ({problem})")
    return content


def measure_here(arguments: Sequence[str]) -> int:
    """Measures in this process, which `measure_in_processes` starts, by JSON and flags; returns the exit code."""
    options = json.loads(arguments[0])
    config = resolve(arguments[1:]).config
    refuse_missing_modules(config)
    with quiet_start():
        from trainer.checks import golden_run
    golden_run.measure(config, **options)
    return DONE


if __name__ == "__main__":
    sys.exit(main())
