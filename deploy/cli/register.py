"""Registers a run's model in Vertex AI's Model Registry: `python -m deploy register RUN --name=digits`."""

import json
from collections.abc import Sequence

from deploy.cli.parsing import parser
from deploy.job.workload import JobOptions
from deploy.platform.errors import api_errors
from deploy.platform.gcloud_and_sdk import SESSION, Session
from deploy.platform.model_registry import checked_alias, checked_name, read_registration, register_run
from deploy.tiers.gcp_config import GcpConfig, needed_project, needed_region, read_project
from trainer.base.errors import DONE


def main(arguments: Sequence[str], session: Session = SESSION) -> int:
    """Registers the run's model as a version, unless it is one already, and moves the alias if one is given."""
    usage = "RUN --name=NAME [--alias=ALIAS] [--image=URI]"
    cli = parser("register", "Registers a run's model as a version in Vertex AI's Model Registry.", usage, JobOptions,
                 "project", "region", "bucket", with_json=False)  # fmt: skip
    cli.add_argument("run", metavar="RUN", help="a job directory whose run is done; also at gs://")
    cli.add_argument("--name", required=True, metavar="NAME", help="the model, of which this becomes a version")
    cli.add_argument("--alias", default="", metavar="ALIAS", help="move this alias to the version, as champion")
    cli.add_argument("--image", default="", metavar="URI", help="the image that serves it (default: the one that "
                     "`image` built in this folder)")  # fmt: skip
    cli.add_boolean("dry_run", "print the request and stop")
    args = cli.parse_args(arguments)
    name, alias = checked_name(args.name), checked_alias(args.alias)
    gcp = GcpConfig(needed_project(read_project(args.project)), needed_region(args.region), args.bucket)
    registration = read_registration(args.run, name, args.image, gcp)
    if args.dry_run:
        print(f"POST projects/{gcp.project}/locations/{gcp.region}/models:upload")
        print(json.dumps({"model": registration.model}, indent=1))
        return DONE
    with api_errors(gcp):
        register_run(registration, alias, session.open("sdk", gcp.project, gcp.region), session.clock)
    return DONE
