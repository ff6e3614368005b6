"""Answers a file of rows with a registered model: `python -m deploy predict MODEL ROWS OUT --tier=TIER`."""

from collections.abc import Sequence

from deploy.client.arguments import add_flags, command_line, parser
from deploy.client.documents import add_json_flag
from deploy.client.job_flags import CHANGES, new_submission, read_changes
from deploy.client.prepared_job import PreparedSubmission, check_wait, describe
from deploy.tiers.gcp_config import GcpConfig, checked_address, needed_project, needed_region, read_project
from deploy.tiers.job_request import JobOptions
from deploy.tiers.job_spec import render
from deploy.tiers.prediction import PredictionRequest
from deploy.tiers.spec_changes import read_labels
from deploy.tiers.tier import load_tier
from deploy.vertex.errors import api_errors
from deploy.vertex.history import Submission
from deploy.vertex.registry import find_version
from deploy.vertex.retry import retried
from deploy.vertex.session import SESSION, Session
from trainer.base.errors import UserError


def main(arguments: Sequence[str], session: Session = SESSION) -> int:
    """Submits one job and follows it. Returns the exit code of how it ended."""
    cli = parser(
        "predict",
        "Answers rows (JSON lines) with a registered model.",
        "MODEL[@ALIAS] gs://…/ROWS.jsonl gs://…/OUT --tier=TIER",
    )
    cli.add_argument("model", metavar="MODEL", help="NAME, NAME@ALIAS or NAME@VERSION of the Model Registry")
    cli.add_argument("rows", metavar="ROWS", help="a file in a bucket, a line of JSON a row")
    cli.add_argument("out", metavar="OUT", help="a folder in a bucket, for predictions-….jsonl and errors-….jsonl")
    cli.add_argument("--tier", required=True, metavar="TIER", help="machine of one device, as cpu or l4x1")
    add_flags(cli, "project", "region", "prices", "max_cost", "max_wait", *CHANGES, "backend")
    cli.add_boolean("dry_run", "print what would run and what it may cost, and stop")
    cli.add_boolean("detach", "do not follow the job once it is submitted")
    add_json_flag(cli)
    args = cli.parse_args(arguments)
    rows, out = checked_address("rows", args.rows), checked_address("out", args.out)
    gcp = GcpConfig(needed_project(read_project(args.project)), needed_region(args.region), out)
    tier = load_tier(args.tier, args.prices, read_changes(args))
    if tier.workers > 1 or tier.accelerators > 1:
        raise UserError(f"tier={tier.name}: one device answers rows, and it has {tier.devices}: use cpu or l4x1")
    check_wait(args, tier, "detach" if args.detach else "")
    with api_errors(gcp):
        backend = session.open(args.backend, gcp.project, gcp.region)
        version = retried(lambda: find_version(args.model, backend), session.clock)
    request = PredictionRequest(tier, str(version), version.artifact, version.image, rows, out)
    options = JobOptions(
        f"predict-{version.name.rsplit('/', 1)[-1]}", new_submission(), max_cost=args.max_cost,
        max_wait_s=args.max_wait, labels=read_labels(args.labels), kms_key=args.kms_key,
    )  # fmt: skip
    job = render(request, gcp, options)
    record = Submission(options.submission, command=command_line("predict", arguments), sources=[str(version)])
    return PreparedSubmission(args, options, [job], record, session, describe([job])).run("predict")
