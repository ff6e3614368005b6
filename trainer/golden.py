"""Keeps the numbers of a run's first steps in a file, and tells later whether they are still the same.

  python -m trainer.golden record --recipe=mine.yaml --steps=30 --out=golden/mine.json
  python -m trainer.golden check golden/*.json [--replicas=1,2] [--workers=1,2] [--junit=out.xml]
  python -m trainer.golden bisect golden/mine.json --good=v1.2 [--bad=HEAD]

`record` takes the flags of python -m trainer.task. It trains in float64 with at most 16 rows a batch, and built-in
models with width 8 at most, unless a flag says otherwise. Each verdict is one line: equal bits; rounding, within three
times what another order of the rows does; or CHANGED, from which step, in which tensor, and what else differs.

Exit codes: 0 nothing has changed; 2 something has, or you must change something; 1 a fault of this package or of the
platform."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer.base.errors import DONE, UserError
from trainer.base.log import set_verbose
from trainer.base.settings.flags import Parser
from trainer.base.settings.own_settings import refuse_missing_modules
from trainer.base.settings.resolution import Command, resolve
from trainer.user_code.command import quiet_start, run_command

_LENGTH = 30  # steps
_SMALL = {"precision": "float64", "global_batch_size": 16, "width": 8}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return run_command(lambda: _run(words), "starts from scratch")


def _run(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(__doc__)
        return DONE
    if words[0] not in VERBS:
        raise UserError(f"{words[0]!r} is no verb of trainer.golden: use {', '.join([*VERBS][:-1])}")
    return VERBS[words[0]](words[1:])


def small_flags(arguments: Sequence[str], command: Command) -> list[str]:
    """Returns the flags of a small run: those given, and smaller sizes where they are not."""
    names = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in arguments}
    settings = vars(command.config)
    steps = [] if {"steps", "epochs"} & names else [f"--steps={_LENGTH}"]
    sizes = [
        f"--{name}={value if isinstance(value, str) else min(value, settings[name])}"
        for name, value in _SMALL.items()
        if name in settings and name not in names
    ]
    return [*arguments, *steps, *sizes]


def parser_of(verb: str) -> Parser:
    """Returns the parser of a verb's own flags; settings of a run are left to `resolve`."""
    parser = Parser(prog=f"python -m trainer.golden {verb}", description=__doc__, add_help=verb in ("check", "bisect"))
    if verb == "record":
        parser.add_argument("--out", default="", metavar="FILE", help="the golden file")
    elif verb == "check":
        parser.add_argument("files", nargs="+", metavar="FILE")
        parser.add_argument("--replicas", type=_counts, default=[1], help="numbers of replicas (default: 1)")
        parser.add_argument("--workers", type=_counts, default=[1], help="numbers of workers with one (default: 1)")
        parser.add_argument("--junit", default="", metavar="FILE", help="the verdicts as JUnit's XML")
    elif verb == "bisect":
        parser.add_argument("file", metavar="FILE")
        parser.add_argument("--good", required=True, metavar="COMMIT", help="a commit that has the recorded numbers")
        parser.add_argument("--bad", default="HEAD", metavar="COMMIT", help="one that has not (default: %(default)s)")
    else:
        parser.add_argument("--out", required=True)
        parser.add_argument("--after", type=_counts, required=True)
        parser.add_argument("--on", type=int, required=True)
        parser.add_argument("--control", action="store_true")
    return parser


def _record(arguments: Sequence[str]) -> int:
    parser = parser_of("record")
    options, settings = parser.parse_known_args(arguments)
    flags = small_flags(settings, resolve(settings, prog=parser.prog, description=__doc__, parents=[parser]))
    command = resolve(flags)
    set_verbose(command.verbose)
    if not options.out:
        raise UserError("--out=FILE is missing: name the golden file, as golden/mine.json")
    refuse_missing_modules(command.config)
    from trainer.proofs.golden_check import record

    record(Path(options.out), flags, command.config)
    return DONE


def _check(arguments: Sequence[str]) -> int:
    options = parser_of("check").parse_args(arguments)
    from trainer.proofs.golden_check import check

    ways = [(count, 1) for count in options.replicas] + [(1, count) for count in options.workers if count > 1]
    return check([Path(file) for file in options.files], ways, Path(options.junit) if options.junit else None)


def _bisect(arguments: Sequence[str]) -> int:
    options = parser_of("bisect").parse_args(arguments)
    from trainer.proofs.golden_check import bisect

    return bisect(Path(options.file), options.good, options.bad)


def _measure(arguments: Sequence[str]) -> int:
    """Measures in this process, for trainer.proofs.processes."""
    options, settings = parser_of("measure").parse_known_args(arguments)
    config = resolve(settings).config
    refuse_missing_modules(config)
    with quiet_start():
        from trainer.proofs.golden_run import measure
    measure(config, options.after, options.on, Path(options.out), control=options.control)
    return DONE


def _counts(text: str) -> list[int]:
    """Parses whole numbers from 1 on, separated by commas."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers from 1 on, as 1,2")
    return [int(part) for part in parts]


VERBS = {"record": _record, "check": _check, "bisect": _bisect, "measure": _measure}

if __name__ == "__main__":
    sys.exit(main())
