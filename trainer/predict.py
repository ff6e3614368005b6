"""Writes what the model of a run predicts: `python -m trainer.predict RUN --data=… --out=x.npz [--replicas=2]`.

These are the numbers of Keras's `model.predict`, on any number of replicas of this machine.
"""

import sys
from collections.abc import Sequence

from trainer.base.errors import DONE, UserError
from trainer.base.log import log, set_verbose
from trainer.base.settings.flags import Parser
from trainer.base.storage import local_path, make_writable, write_whole
from trainer.run.requested_run import make_parser, read_request
from trainer.user_code.command import quiet_start, run_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Predicts and writes the outputs; returns the exit code."""
    return run_command(lambda: _predict(arguments), "starts from scratch")


def _predict(arguments: Sequence[str] | None) -> int:
    run = read_request(_parser(), arguments)
    set_verbose(run.options.verbose)
    out = local_path(run.options.out, "out")
    if out.suffix != ".npz":
        raise UserError(f"out={out}: the arrays are written as .npz: use a name that ends in .npz")
    make_writable(out.parent, "out")
    data = run.config.data  # finds mistakes before TensorFlow is loaded
    with quiet_start():
        from trainer.run import saved_run  # imports TensorFlow
    with run.naming():
        arrays, count = saved_run.predict(run)
    write_whole(out, lambda path: saved_run.write_npz(path, arrays))
    shown = ", ".join(f"{name} {array.dtype} {array.shape}" for name, array in arrays.items())
    log.info(f"{run.name} on {count:,} examples of {data}: {out} holds {shown}")
    return DONE


def _parser() -> Parser:
    parser = make_parser("python -m trainer.predict", (__doc__ or "").partition(":")[0])
    parser.add_argument("--out", default="predictions.npz", metavar="FILE", help="the .npz (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
