"""Trains random stretches of a run again and compares: did these code and data give these weights?

  python -m trainer.audit runs/job --segments=3 --seed=2026 [--replicas=1] [--data=…] [--out=audit.json]

A stretch lies between two checkpoints that were kept one after the other (--keep_checkpoints=all keeps every one). The
seed, which the auditor names, decides which stretches are taken. The certificate is an in-toto Statement.

Exit codes: 0 each stretch gives the same bits, or the same up to rounding; 2 one does not, or you must change
something; 1 a fault of this package or of the platform."""

import sys
from collections.abc import Sequence
from pathlib import Path

from trainer.base.log import set_verbose
from trainer.base.settings.flags import Parser, whole
from trainer.run.requested_run import NEWEST, make_parser, read_request
from trainer.user_code.command import quiet_start, run_command

_MOST = 10**6


def main(arguments: Sequence[str] | None = None) -> int:
    """Audits a run; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return run_command(lambda: _audit(words), "starts from scratch")


def parser_of_audit() -> Parser:
    """Returns the parser of the flags, but for settings of the run's own data."""
    parser = make_parser("python -m trainer.audit", __doc__ or "")
    parser.add_argument("--segments", type=whole(1, _MOST), default=3, metavar="INT",
                        help="stretches to train again (default: %(default)s)")  # fmt: skip
    parser.add_argument("--seed", type=whole(0, 2**31), required=True, metavar="INT",
                        help="decides which; named by the auditor")  # fmt: skip
    parser.add_argument("--out", default="audit.json", metavar="FILE", help="the certificate (default: %(default)s)")
    return parser


def _audit(words: Sequence[str]) -> int:
    request = read_request(parser_of_audit(), [*words, f"--checkpoint={NEWEST}"])
    set_verbose(request.options.verbose)
    with quiet_start():
        from trainer.proofs.auditing import audit
    options = request.options
    return audit(request, options.segments, options.seed, Path(options.out))


if __name__ == "__main__":
    sys.exit(main())
