"""Writes what the model of a run predicts: `python -m trainer.predict RUN --data=… --out=x.npz
[--replicas=2]`.

These are the numbers of Keras's `model.predict`, on any number of replicas of this machine. With
`--rows_file=FILE.jsonl` it answers the rows of a file, as the server of the model does.
"""

import sys
from collections.abc import Sequence

from trainer.base.errors import DONE, USER_MUST_CHANGE, UserError
from trainer.base.log import ANSWER, log, set_verbose
from trainer.base.run_files.serving_file import model_folder
from trainer.base.settings.fields import Usage, options_class, parse_options, setting
from trainer.base.storage import local_path, make_writable, write_whole
from trainer.base.storage.staging import stage
from trainer.run.requested_run import RunOptions, read_request
from trainer.user_code.command import command, quiet_start

USAGE = Usage(
    "python -m trainer.predict",
    "RUN [--data=…] [--out=FILE] [--rows_file=FILE] [--setting=value …]",
    __doc__,
)


@options_class
class PredictOptions(RunOptions):
    """Holds the options of `trainer.predict`."""

    out: str = setting(
        "predictions.npz", "the .npz; with --rows_file a folder, also at gs://", metavar="FILE"
    )
    rows_file: str = setting(
        "", "JSON lines, one per row, answered as the server does; also at gs://", metavar="FILE"
    )


@options_class
class RowsOptions:
    """Holds the options of `trainer.predict` that answers the rows of a file."""

    run: str = setting(
        meaning="a job directory or its model/; also at gs://", metavar="RUN", positional=True
    )
    rows_file: str = setting(meaning="a line of JSON a row; also at gs://", metavar="FILE")
    out: str = setting(meaning="folder of the answers; also at gs://", metavar="DIR")


@command("starts from scratch", answers=True)
def main(arguments: Sequence[str]) -> int:
    """Predicts the rows of the data, writes the outputs as .npz, and returns the exit code."""
    if any(argument.startswith("--rows_file") for argument in arguments):
        return _predict_rows(arguments)
    run = read_request(PredictOptions, arguments, USAGE)
    set_verbose(run.options.verbose)
    out = local_path(run.options.out, "out")
    if out.suffix != ".npz":
        raise UserError(f"out={out}: the arrays are written as .npz: use a name that ends in .npz")
    make_writable(out.parent, "out")
    # resolves the settings, which finds mistakes before TensorFlow is loaded
    data = run.config.data
    with quiet_start():
        from trainer.measures.prediction import write_npz  # imports TensorFlow
        from trainer.run import saved_run
    with run.naming():
        arrays, count = saved_run.predict_run(run)
    write_whole(out, lambda path: write_npz(path, arrays))
    shown = ", ".join(f"{name} {array.dtype} {array.shape}" for name, array in arrays.items())
    log.info(f"{run.name} on {count:,} examples of {data}: {out} holds {shown}", extra=ANSWER)
    return DONE


def _predict_rows(arguments: Sequence[str]) -> int:
    """Answers each line of a JSON Lines file as the server does; returns the exit code."""
    args = parse_options(
        RowsOptions, arguments, Usage(USAGE.program, "RUN --rows_file=FILE --out=DIR")
    )
    rows = stage(args.rows_file, "rows_file")
    folder = model_folder(args.run)
    if not rows.is_file():
        raise UserError(f"rows_file={args.rows_file}: there is no such file")
    with quiet_start():
        from trainer.run.prediction_files import predict_rows
        from trainer.run.served_model import ServedModel
    answered, failed = predict_rows(ServedModel(folder, args.run), rows, args.out)
    problems = f"; {failed:,} rows have none: errors-….jsonl says why" if failed else ""
    log.info(f"{args.out} holds {answered:,} answers{problems}", extra=ANSWER)
    return DONE if answered else USER_MUST_CHANGE


if __name__ == "__main__":
    sys.exit(main())
