"""Implements the verbs for runs that have ended: `report`, `track` and `register`."""

import json
import re
from collections.abc import Sequence

from deploy.api.compare import CompareOptions, read_comparison
from deploy.base.options import read_prices
from deploy.cli.parsing import parser, write_document
from deploy.job.workload import JobOptions
from deploy.platform.errors import api_errors
from deploy.platform.gcloud_and_sdk import SESSION, Session
from deploy.platform.model_registry import checked_name, read_registration, register_run
from deploy.report import tracked_runs
from deploy.report.html_page import write_report
from deploy.tiers.gcp_config import GcpConfig, needed_project, needed_region, read_project
from trainer.base.errors import DONE, UserError
from trainer.base.storage import is_remote, local_path


def report(arguments: Sequence[str]) -> int:
    """Writes the report on the folders that are named, and returns the exit code."""
    cli = parser("report", "Makes a table, a verdict and one self-contained report.html from job directories.",
                 "DIR … [--baseline=TIER] [--price_per_hour=TIER=USD …] [--out=FOLDER]",
                 CompareOptions, "baseline", "price_per_hour")  # fmt: skip
    cli.add_argument(
        "folders", nargs="+", metavar="DIR", help="a job directory, a folder of them, or a comparison's; local or gs://"
    )
    cli.add_argument("--out", default="", metavar="FOLDER", help="folder of the report (default: the first DIR, or "
                     "runs/report if that is in a bucket)")  # fmt: skip
    args = cli.parse_args(arguments)
    out = args.out or ("runs/report" if is_remote(args.folders[0]) else args.folders[0])
    write_report(args.folders, out, args.baseline, read_prices(args.price_per_hour))
    written = read_comparison(local_path(out, "out"), DONE)
    write_document(args, "report", **vars(written) | {"folder": str(written.folder)})
    return DONE


def track(arguments: Sequence[str]) -> int:
    """Sends finished runs to trackers, except what a tracker already has, and returns the exit code."""
    cli = parser("track", "Sends finished runs to trackers: `track RUN… --track=mlflow:http://HOST:PORT#EXPERIMENT`.",
                 "RUN … --track=TRACKER[,TRACKER]", with_json=False)  # fmt: skip
    cli.add_argument("runs", nargs="+", metavar="RUN", help="a job directory, or the folder of a comparison; local or "
                     "gs://")  # fmt: skip
    cli.add_argument(
        "--track", required=True, metavar="TRACKER", help="as that of the trainer: docs/tracking.md lists them"
    )
    args = cli.parse_args(arguments)
    tracked_runs.track(args.runs, args.track)
    return DONE


def register(arguments: Sequence[str], session: Session = SESSION) -> int:
    """Registers a run's model as a version, unless it is one already, and moves the alias if one is given."""
    cli = parser("register", "Registers a run's model as a version in Vertex AI's Model Registry.",
                 "RUN --name=NAME [--alias=ALIAS] [--image=URI]", JobOptions, "project", "region", "bucket",
                 with_json=False)  # fmt: skip
    cli.add_argument("run", metavar="RUN", help="a job directory whose run is done; also at gs://")
    cli.add_argument("--name", required=True, metavar="NAME", help="the model, of which this becomes a version")
    cli.add_argument("--alias", default="", metavar="ALIAS", help="move this alias to the version, as champion")
    cli.add_argument("--image", default="", metavar="URI", help="the image that serves it (default: the one that "
                     "`image` built in this folder)")  # fmt: skip
    cli.add_boolean("dry_run", "print the request and stop")
    args = cli.parse_args(arguments)
    name = checked_name(args.name)
    if args.alias and not re.fullmatch(r"[a-z][a-zA-Z0-9-]{0,126}[a-z0-9]", args.alias):
        raise UserError(f"alias={args.alias}: use letters, digits and -, 2 to 128, a small letter first, as champion")
    gcp = GcpConfig(needed_project(read_project(args.project)), needed_region(args.region), args.bucket)
    registration = read_registration(args.run, name, args.image, gcp)
    if args.dry_run:
        print(f"POST projects/{gcp.project}/locations/{gcp.region}/models:upload")
        print(json.dumps({"model": registration.model}, indent=1))
        return DONE
    with api_errors(gcp):
        register_run(registration, args.alias, session.open("sdk", gcp.project, gcp.region), session.clock)
    return DONE
