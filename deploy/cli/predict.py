"""Answers a file of rows with a registered model: `python -m deploy predict MODEL ROWS OUT --tier=TIER`."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

from deploy.api.keywords import command_line
from deploy.api.submit import check_wait, describe, new_submission
from deploy.base.options import parsed
from deploy.cli.parsing import parser
from deploy.cli.submit import run
from deploy.job.cost import cost_confirmation
from deploy.job.fallback import SubmittedJob
from deploy.job.job import job_of
from deploy.job.ledger import Submission
from deploy.job.workload import JobOptions, Order, Workload, Written
from deploy.packaging.images import Image
from deploy.platform.errors import api_errors
from deploy.platform.gcloud_and_sdk import SESSION, Session
from deploy.platform.model_registry import find_version
from deploy.platform.vertex_api import retried
from deploy.tiers.gcp_config import GcpConfig, checked_address, needed_project, needed_region, read_project
from deploy.tiers.tier import load_tier
from trainer.base.errors import UserError
from trainer.base.run_files.serving_file import SAME_BYTES


@dataclasses.dataclass(frozen=True)
class Prediction(Workload):
    """Holds a prediction for a file of rows, which runs in the image of a registered model."""

    same_bytes: bool

    def arguments(self) -> list[str]:
        flags = [f"--rows_file={self.inputs['rows']}", f"--out={self.job_dir}"]
        return [self.inputs["model"], *flags, *(["--same_bytes"] if self.same_bytes else [])]

    def write(self, spec: dict[str, Any], gcp: GcpConfig, order: Order, image: Image) -> Written:
        spec["workerPoolSpecs"][0].pop("pythonPackageSpec", None)
        spec["workerPoolSpecs"][0]["containerSpec"] = {
            "imageUri": order.asked.image, "command": ["python", "-m", "trainer.predict"], "args": self.arguments(),
        }  # fmt: skip
        return (), (f"runs in {order.asked.image}, the image of the version",), ()


def main(arguments: Sequence[str], session: Session = SESSION) -> int:
    """Submits one job and follows it to its end. Returns its exit code."""
    cli = parser(
        "predict",
        "Answers rows (JSON lines) with a registered model.",
        "MODEL[@ALIAS] gs://…/ROWS.jsonl gs://…/OUT --tier=TIER",
        JobOptions, "project", "region", "prices", "max_cost", "max_wait", "timeout", "flex_start", "spot", "disk_gb",
        "reservation", "labels", "kms_key", "service_account", "network", "env", "web_access", "backend",
    )  # fmt: skip
    cli.add_argument("model", metavar="MODEL", help="NAME, NAME@ALIAS or NAME@VERSION of the Model Registry")
    cli.add_argument("rows", metavar="ROWS", help="a file in a bucket, a line of JSON a row")
    cli.add_argument("out", metavar="OUT", help="a folder in a bucket, for predictions-….jsonl and errors-….jsonl")
    cli.add_argument("--tier", required=True, metavar="TIER", help="machine of one device, as cpu or l4x1")
    cli.add_boolean("same_bytes", SAME_BYTES)
    cli.add_boolean("dry_run", "print what would run and what it may cost, and stop")
    cli.add_boolean("detach", "do not follow the job once it is submitted")
    args = cli.parse_args(arguments)
    asked = parsed(JobOptions, args)
    rows, out = checked_address("rows", args.rows), checked_address("out", args.out)
    gcp = GcpConfig(needed_project(read_project(args.project)), needed_region(args.region), out)
    tier = load_tier(args.tier, args.prices, asked)
    if tier.workers > 1 or tier.accelerators > 1:
        raise UserError(f"tier={tier.name}: one device answers rows, and it has {tier.devices}: use cpu or l4x1")
    check_wait(args.max_wait, tier, "detach" if args.detach else "")
    with api_errors(gcp):
        backend = session.open(args.backend, gcp.project, gcp.region)
        version = retried(lambda: find_version(args.model, backend), session.clock)
    about, inputs = f"answers the rows of {rows} with {version}", {"rows": rows, "model": version.artifact}
    work = Prediction(tier, args.same_bytes, job_dir=out, about=about, inputs=inputs)
    order = Order(
        dataclasses.replace(asked, image=version.image), f"predict-{version.name.rsplit('/', 1)[-1]}", new_submission()
    )
    job = job_of(work, gcp, order)
    record = Submission(order.submission, command=command_line("predict", arguments), sources=[str(version)])
    confirmation = partial(cost_confirmation, [(job.tier, 1)], [None], asked, alternatives=True)
    return run(SubmittedJob([job], record, session, describe([job]), confirmation), args, "predict")
