"""Sends finished runs to trackers: `python -m deploy track RUN… --track=mlflow:http://HOST:PORT#EXPERIMENT`."""

from collections.abc import Sequence

from deploy.cli.parsing import parser
from deploy.report.tracked_runs import track
from trainer.base.errors import DONE


def main(arguments: Sequence[str]) -> int:
    """Sends the given runs, except what a tracker already has, and returns the exit code."""
    cli = parser("track", __doc__, "RUN … --track=TRACKER[,TRACKER]", with_json=False)
    cli.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="a job directory, or the folder of a comparison; local or gs://",
    )
    cli.add_argument(
        "--track", required=True, metavar="TRACKER", help="as that of the trainer: docs/tracking.md lists them"
    )
    args = cli.parse_args(arguments)
    track(args.runs, args.track)
    return DONE
