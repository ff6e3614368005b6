"""Answers a file of rows with a registered model: `python -m deploy predict MODEL ROWS OUT --tier=TIER`."""

import argparse
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from deploy.client.arguments import add_flags, command_line, parser
from deploy.client.documents import add_json_flag, write_document
from deploy.client.job_flags import CHANGES, new_submission, read_changes
from deploy.client.prepared_job import COST, PreparedSubmission, check_detached, describe
from deploy.planning.cost_rule import agrees_to_pay
from deploy.planning.prediction_plan import prediction_plan
from deploy.tiers.gcp_config import GcpConfig, checked_address, needed_project, needed_region, read_project
from deploy.tiers.job_request import JobOptions
from deploy.tiers.job_spec import render
from deploy.tiers.output import say
from deploy.tiers.prediction import PredictionRequest, on_one_device
from deploy.tiers.spec_changes import read_labels
from deploy.tiers.tier import load_tier
from deploy.vertex.api import ApiError
from deploy.vertex.errors import JobUnknown, api_errors
from deploy.vertex.history import Submission
from deploy.vertex.registry import ModelVersion, find_version
from deploy.vertex.rest import Backend
from deploy.vertex.retry import retried
from deploy.vertex.session import SESSION, Session
from trainer.base.errors import DONE, UserError

_PAGE = "https://console.cloud.google.com/vertex-ai/batch-predictions"


def main(arguments: Sequence[str], session: Session = SESSION) -> int:
    """Submits one job and follows it; with --as=batch_prediction, creates Vertex AI's own job instead."""
    cli = parser(
        "predict",
        "Answers rows (JSON lines) with a registered model.",
        "MODEL[@ALIAS] gs://…/ROWS.jsonl gs://…/OUT --tier=TIER",
    )
    cli.add_argument("model", metavar="MODEL", help="NAME, NAME@ALIAS or NAME@VERSION of the Model Registry")
    cli.add_argument("rows", metavar="ROWS", help="a file in a bucket, a line of JSON a row")
    cli.add_argument("out", metavar="OUT", help="a folder in a bucket, for predictions-….jsonl and errors-….jsonl")
    cli.add_argument("--tier", required=True, metavar="TIER", help="machine of one device, as cpu or l4x1")
    cli.add_argument("--as", dest="kind", choices=("custom_job", "batch_prediction"), default="custom_job",
                     help="batch_prediction: Vertex AI's own job, which has no time limit")  # fmt: skip
    add_flags(cli, "project", "region", "prices", "max_cost", "max_wait", *CHANGES, "backend")
    cli.add_boolean("plan", "first measure a batch on this machine's CPU, for the time and the cost of the job")
    cli.add_argument("--from", default="", metavar="RUN", help="job directory of a run on devices of the tier's kind: "
                     "time and cost come from its speed")  # fmt: skip
    cli.add_boolean("dry_run", "print the request and stop")
    cli.add_boolean("detach", "do not follow the job once it is submitted")
    cli.add_boolean("yes", "do not ask about a batch_prediction, which has no limit")
    add_json_flag(cli)
    cli.set_defaults(month_budget=None)
    args = cli.parse_args(arguments)
    if args.plan and getattr(args, "from"):
        raise UserError("--plan and --from contradict each other: the time is measured here, or that of a run")
    if args.yes and args.kind != "batch_prediction":
        raise UserError("--yes is for --as=batch_prediction: use --max_cost, which limits this job")
    if args.kind == "batch_prediction" and (args.max_cost or args.max_wait or args.plan or getattr(args, "from")):
        flag = "--max_cost" if args.max_cost else "--max_wait" if args.max_wait else "a plan"
        raise UserError(f"--as=batch_prediction and {flag} contradict each other: that job has no time limit: drop one")
    rows, out = checked_address("rows", args.rows), checked_address("out", args.out)
    gcp = GcpConfig(needed_project(read_project(args.project)), needed_region(args.region), out)
    tier = on_one_device(load_tier(args.tier, args.prices, read_changes(args)))
    check_detached(args, tier)
    with api_errors(gcp):
        backend = session.open(args.backend, gcp.project, gcp.region)
        version = retried(lambda: find_version(args.model, backend), session.clock)
        if args.kind == "batch_prediction":
            return _batch_prediction(_batch_request(version, rows, out, tier.spec["workerPoolSpecs"][0]), args, backend)
        request = PredictionRequest(tier, str(version), version.artifact, version.image, rows, out)
        options = JobOptions(
            f"predict-{version.name.rsplit('/', 1)[-1]}", new_submission(), max_cost=args.max_cost,
            max_wait_s=args.max_wait, labels=read_labels(args.labels), kms_key=args.kms_key,
        )  # fmt: skip
        job, run = render(request, gcp, options), getattr(args, "from")
    record = Submission(options.submission, command=command_line("predict", arguments), sources=[str(version)])
    about, plan = list(describe([job])), None
    if args.plan or run:  # made only if no earlier job of this command runs
        plan = partial(prediction_plan, job.tier, version.artifact, rows, run, args.max_cost)
    else:
        about.append((COST, "its time is not known: --plan measures a batch here, --from= takes a run's speed"))
    return PreparedSubmission(args, options, [job], record, session, about, plan=plan).run("predict")


def _batch_request(version: ModelVersion, rows: str, out: str, pool: Any) -> dict[str, Any]:
    """Returns the body of a BatchPredictionJob on the machine of a worker pool."""
    return {
        "displayName": f"predict-{version.name.rsplit('/', 1)[-1]}-{new_submission()}",
        "model": f"{version.name}@{version.version}",
        "inputConfig": {"instancesFormat": "jsonl", "gcsSource": {"uris": [rows]}},
        "outputConfig": {"predictionsFormat": "jsonl", "gcsDestination": {"outputUriPrefix": out}},
        "dedicatedResources": {"machineSpec": pool["machineSpec"], "startingReplicaCount": 1, "maxReplicaCount": 1},
    }


def _batch_prediction(request: dict[str, Any], args: argparse.Namespace, backend: Backend) -> int:
    text, name = "a BatchPredictionJob has no time limit: it costs until it ends, or you cancel it in the console", ""
    say(f"# {text}")
    if args.dry_run:
        say(json.dumps(request, indent=1))
    else:
        if not (args.yes or agrees_to_pay(text)):
            raise UserError(f"{text}: not submitted: answer y, or use --yes")
        try:
            name = backend.call("POST", f"{backend.parent}/batchPredictionJobs", json=request).get("name", "")
        except (ApiError, KeyboardInterrupt) as error:
            if isinstance(error, ApiError) and not error.may_have_succeeded:
                raise
            cause = str(error) or "stopped"
            unknown = f"{cause}: the job may exist: look for {request['displayName']} at {_PAGE} before you repeat it"
            raise JobUnknown(unknown) from None
        say(f"submitted {name}")
    write_document(args, "predict", batch_prediction=request, job=name)
    return DONE
