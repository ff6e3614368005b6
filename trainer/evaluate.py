"""Evaluates the model of a run: `python -m trainer.evaluate RUN [--data=…] [--replicas=2]`.

It gives the numbers of Keras's `model.evaluate` with the loss and the metrics that the run's
function compiles, on any number of replicas of this machine, and of a classifier with integer
labels what it predicts of each class.
"""

import sys
from collections.abc import Sequence

from trainer.base.errors import DONE
from trainer.base.log import ANSWER, log, set_verbose
from trainer.base.run_files.job_files import write_json
from trainer.base.settings.fields import Usage, options_class, setting
from trainer.base.storage import output_file
from trainer.run.requested_run import RunOptions, read_request
from trainer.user_code.command import command, quiet_start

USAGE = Usage(
    "python -m trainer.evaluate", "RUN [--data=…] [--out=FILE] [--setting=value …]", __doc__
)


@options_class
class EvaluateOptions(RunOptions):
    """Holds the options of `trainer.evaluate`."""

    out: str = setting(
        "",
        "a .json file for the values too; of a classifier also FILE.classes.json",
        metavar="FILE",
    )


@command("starts from scratch", answers=True)
def main(arguments: Sequence[str]) -> int:
    """Evaluates the run's model, logs the values, writes --out, and returns the exit code."""
    run = read_request(EvaluateOptions, arguments, USAGE)
    set_verbose(run.options.verbose)
    out = output_file(run.options.out, ".json") if run.options.out else None
    # resolves the settings, which finds mistakes before TensorFlow is loaded
    data = run.config.data
    with quiet_start():
        from trainer.reporting.classification import write_classes  # imports NumPy
        from trainer.run import saved_run  # imports TensorFlow
    with run.naming():
        values, count, classes = saved_run.evaluate_run(run)
    shown = "  ".join(f"{name} {value:.6g}" for name, value in values.items())
    log.info(f"{run.name} on {count:,} examples of {data}: {shown}", extra=ANSWER)
    if out:
        content = {"run": run.name, "data": data, "examples": count, "values": values}
        if classes:
            content["classes"] = write_classes(out.with_suffix(".classes.json"), classes)
        write_json(out, content)
    return DONE


if __name__ == "__main__":
    sys.exit(main())
