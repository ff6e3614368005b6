"""Writes what the model of a run predicts: `python -m trainer.predict RUN --data=… --out=x.npz [--replicas=2]`.

These are the numbers of Keras's `model.predict`, on any number of replicas of this machine. With
`--rows_file=FILE.jsonl` it answers the rows of a file, as the server of the model does; with `--same_bytes` the bytes
of all three are the same.
"""

import sys
from collections.abc import Sequence

from trainer.base.errors import DONE, USER_MUST_CHANGE, UserError
from trainer.base.log import log, set_verbose
from trainer.base.run_files.serving_file import SAME_BYTES, model_folder
from trainer.base.settings.fields import Parser
from trainer.base.storage import local_path, make_writable, write_whole
from trainer.base.storage.staging import stage
from trainer.run.requested_run import make_parser, read_request
from trainer.user_code.command import command, quiet_start


@command("starts from scratch")
def main(arguments: Sequence[str]) -> int:
    """Predicts the rows of the data, writes the outputs as .npz, and returns the exit code."""
    if any(argument.startswith("--rows_file") for argument in arguments):
        return _predict_rows(arguments)
    run = read_request(command_parser(), arguments)
    set_verbose(run.options.verbose)
    out = local_path(run.options.out, "out")
    if out.suffix != ".npz":
        raise UserError(f"out={out}: the arrays are written as .npz: use a name that ends in .npz")
    make_writable(out.parent, "out")
    data = run.config.data  # resolves the settings, which finds mistakes before TensorFlow is loaded
    with quiet_start():
        from trainer.measures.prediction import write_npz  # imports TensorFlow
        from trainer.run import saved_run
    with run.naming():
        arrays, count = saved_run.predict(run)
    write_whole(out, lambda path: write_npz(path, arrays))
    shown = ", ".join(f"{name} {array.dtype} {array.shape}" for name, array in arrays.items())
    log.info(f"{run.name} on {count:,} examples of {data}: {out} holds {shown}")
    return DONE


def _predict_rows(arguments: Sequence[str]) -> int:
    """Answers each line of a JSON Lines file as the server of the model does; returns the exit code."""
    parser = Parser(prog="python -m trainer.predict", description="Answers the rows of a file as a server does")
    parser.add_argument("run", metavar="RUN", help="a job directory or its model/; also at gs://")
    parser.add_argument("--rows_file", required=True, metavar="FILE", help="a line of JSON a row; also at gs://")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder of the answers; also at gs://")
    parser.add_boolean("same_bytes", SAME_BYTES)
    args = parser.parse_args(arguments)
    rows, folder = stage(args.rows_file, "rows_file"), model_folder(args.run)
    if not rows.is_file():
        raise UserError(f"rows_file={args.rows_file}: there is no such file")
    with quiet_start():
        from trainer.run.served_model import ServedModel, predict_rows
    answered, failed = predict_rows(ServedModel(folder, args.run, same_bytes=args.same_bytes), rows, args.out)
    problems = f"; {failed:,} rows have none: errors-….jsonl says why" if failed else ""
    log.info(f"{args.out} holds {answered:,} answers{problems}")
    return USER_MUST_CHANGE if failed and not answered else DONE


def command_parser() -> Parser:
    """Returns the parser of the command line."""
    parser = make_parser("python -m trainer.predict", (__doc__ or "").partition(":")[0])
    parser.add_argument("--out", default="predictions.npz", metavar="FILE", help="the .npz (default: %(default)s)")
    parser.add_argument("--rows_file", metavar="FILE", help="JSON lines, one per row, answered as the server does; "
                        "--out is then a folder")  # fmt: skip
    parser.add_boolean("same_bytes", f"{SAME_BYTES}; without it --evaluation_batch_size rows")
    return parser


if __name__ == "__main__":
    sys.exit(main())
