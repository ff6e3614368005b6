"""Answers a file of rows with a registered model: `python -m deploy predict MODEL ROWS OUT --tier=TIER`."""

import argparse
import json
import math
import signal
from collections.abc import Sequence
from typing import Any

from deploy.cli.arguments import add_flags, parser
from deploy.cli.job_flags import CHANGES, new_submission, read_changes
from deploy.localrun.processes import on_signals
from deploy.tiers.gcp_config import GcpConfig, checked_address, needed_project, needed_region, read_project
from deploy.tiers.job_request import JobOptions
from deploy.tiers.job_spec import Job, render
from deploy.tiers.prediction import PredictionRequest, on_one_device
from deploy.tiers.spec_changes import read_labels
from deploy.tiers.tier import load_tier
from deploy.vertex.errors import exit_code, exit_on_api_error
from deploy.vertex.gcloud import Gcloud
from deploy.vertex.history import Submission, attempt_label, record_status
from deploy.vertex.logs import watch_job
from deploy.vertex.registry import ModelVersion, find_version
from deploy.vertex.rest import Backend
from deploy.vertex.retry import retried
from deploy.vertex.session import SESSION, Session
from deploy.vertex.spending import price_and_limit
from deploy.vertex.submission import check_resources, custom_job, submit_job
from trainer.base.errors import DONE, INTERRUPTED, UserError


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
    add_flags(cli, "project", "region", "prices", "max_cost", *CHANGES, "backend")
    cli.add_boolean("dry_run", "print the request and stop")
    cli.add_boolean("detach", "do not follow the job once it is submitted")
    args = cli.parse_args(arguments)
    if args.kind == "batch_prediction" and args.max_cost:
        raise UserError(
            "--as=batch_prediction and --max_cost contradict each other: that job has no time limit: drop one"
        )
    rows, out = checked_address("rows", args.rows), checked_address("out", args.out)
    gcp = GcpConfig(needed_project(read_project(args.project)), needed_region(args.region), out)
    tier = on_one_device(load_tier(args.tier, args.prices, read_changes(args)))
    with exit_on_api_error(gcp), on_signals(signal.default_int_handler, signal.SIGTERM):
        backend = session.open(args.backend, gcp.project, gcp.region)
        version = retried(lambda: find_version(args.model, backend), session.clock)
        if args.kind == "batch_prediction":
            return _batch_prediction(_batch_request(version, rows, out, tier.spec["workerPoolSpecs"][0]), args, backend)
        request = PredictionRequest(tier, str(version), version.artifact, version.image, rows, out)
        options = JobOptions(
            f"predict-{version.name.rsplit('/', 1)[-1]}", new_submission(), max_cost=args.max_cost,
            labels=read_labels(args.labels), kms_key=args.kms_key,
        )  # fmt: skip
        return _custom_job(render(request, gcp, options), Submission(options.submission), args, backend, session)


def _custom_job(job: Job, record: Submission, args: argparse.Namespace, backend: Backend, session: Session) -> int:
    if args.dry_run:
        request = custom_job(job, attempt_label(record.submission))
        print(f"{Gcloud(job.gcp.project, job.gcp.region).shell_command(request)}\n")
    for line in (f"{job.name}: {job.tier.machine} in {job.gcp.region}, {job.tier.strategy}", job.request.about,
                 f"writes to {job.output}", *job.about, price_and_limit(job.tier)):  # fmt: skip
        print(f"# {line}", flush=True)
    if args.dry_run:
        return DONE
    check_resources(job)
    name = submit_job(job, record, lambda *place: session.open(args.backend, *place), session.clock)
    if args.detach:
        print(f"watch it: python -m deploy watch {name}")
        return DONE
    status = watch_job(backend, name, job.gcp, session.clock, created=True, max_wait_s=math.inf)
    if status is None:
        return INTERRUPTED
    record_status(record, record.attempts[-1], status, session.clock.now())
    return exit_code(status)


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
    print("# a BatchPredictionJob has no time limit: it costs until it ends, or until you cancel it in the console")
    if args.dry_run:
        print(json.dumps(request, indent=1))
        return DONE
    created = backend.call("POST", f"{backend.parent}/batchPredictionJobs", json=request)
    print(f"submitted {created.get('name')}")
    return DONE
