"""Implements the verbs for runs that have ended: `report`, `track` and `register`."""

import json
import re
from collections.abc import Mapping, Sequence

from deploy.api.compare import CompareOptions, read_comparison
from deploy.api.request import verb_usage
from deploy.cli.output import JSON, write_document
from deploy.comparison import tracked_runs
from deploy.job.options import JobOptions
from deploy.platform.errors import api_errors
from deploy.platform.model_registry import checked_name, read_registration, register_run
from deploy.platform.rest import Platform
from deploy.report.collection import report_folder
from deploy.report.html_page import write_report
from deploy.tiers.gcp_config import GcpConfig, needed_project, needed_region
from trainer.base.errors import DONE, UserError
from trainer.base.settings.fields import options_class, parse_options, setting, setting_of
from trainer.base.storage import is_remote, local_path


@options_class
class ReportFlags:
    """Holds the flags of `report`."""

    folders: tuple[str, ...] = setting(
        meaning="a job directory, a folder of them, or a comparison's; local or gs://",
        metavar="DIR",
        positional=True,
    )
    out: str = setting(
        "",
        "folder of the report (default: a comparison's own, else report/ beside all runs; of a"
        " bucket runs/report)",
        "FOLDER",
    )
    baseline: str = setting_of(CompareOptions, "baseline")
    price_per_hour: Mapping[str, float] = setting_of(CompareOptions, "price_per_hour")
    json: bool = JSON


@options_class
class TrackFlags:
    """Holds the flags of `track`."""

    runs: tuple[str, ...] = setting(
        meaning="a job directory, or the folder of a comparison; local or gs://",
        metavar="RUN",
        positional=True,
    )
    track: tuple[str, ...] = setting(
        meaning="as that of the trainer: docs/tracking.md lists them", metavar="TRACKER,…"
    )


@options_class
class RegisterFlags:
    """Holds the flags of `register`."""

    run: str = setting(
        meaning="a job directory whose run is done; also at gs://", metavar="RUN", positional=True
    )
    name: str = setting(meaning="the model that gets this version", metavar="NAME")
    alias: str = setting("", "move this alias to the version, as champion", "ALIAS")
    image: str = setting(
        "",
        "the image that serves it (default: the one that `image` built in this folder)",
        "URI",
    )
    project: str = setting_of(JobOptions, "project")
    region: str = setting_of(JobOptions, "region")
    bucket: str = setting_of(JobOptions, "bucket")
    dry_run: bool = setting(False, "print the request and stop")


_REPORT = verb_usage(
    "report",
    "DIR … [--baseline=TIER] [--price_per_hour=TIER=USD …] [--out=FOLDER]",
    "Makes a table, a verdict and one self-contained report.html from job directories.",
)
_TRACK = verb_usage(
    "track",
    "RUN … --track=TRACKER[,TRACKER]",
    "Sends finished runs to trackers: `track RUN… --track=mlflow:http://HOST:PORT#EXPERIMENT`.",
)
_REGISTER = verb_usage(
    "register",
    "RUN --name=NAME [--alias=ALIAS] [--image=URI]",
    "Registers a run's model as a version in Vertex AI's Model Registry.",
)


def run_report(arguments: Sequence[str]) -> int:
    """Writes the report on the folders that are named, and returns the exit code."""
    args = parse_options(ReportFlags, arguments, _REPORT)
    out = args.out or (
        "runs/report" if any(map(is_remote, args.folders)) else report_folder(args.folders)
    )
    write_report(args.folders, out, args.baseline, args.price_per_hour)
    written = read_comparison(local_path(out, "out"), DONE)
    write_document(args, "report", **vars(written) | {"folder": str(written.folder)})
    return DONE


def run_track(arguments: Sequence[str]) -> int:
    """Sends to trackers what they lack of finished runs, and returns the exit code."""
    args = parse_options(TrackFlags, arguments, _TRACK)
    tracked_runs.track_runs(args.runs, args.track)
    return DONE


def run_register(arguments: Sequence[str]) -> int:
    """Registers a run's model as a version, once, and moves the alias if one is given."""
    args = parse_options(RegisterFlags, arguments, _REGISTER)
    name = checked_name(args.name)
    if args.alias and not re.fullmatch(r"[a-z][a-zA-Z0-9-]{0,126}[a-z0-9]", args.alias):
        raise UserError(
            f"alias={args.alias}: use letters, digits and -, 2 to 128, a small letter first, as"
            " champion"
        )
    gcp = GcpConfig(needed_project(args.project), needed_region(args.region), args.bucket)
    registration = read_registration(args.run, name, args.image, gcp)
    if args.dry_run:
        print(f"POST projects/{gcp.project}/locations/{gcp.region}/models:upload")
        print(json.dumps({"model": registration.model}, indent=1))
        return DONE
    with api_errors(gcp):
        register_run(registration, args.alias, Platform(gcp.project, gcp.region))
    return DONE
