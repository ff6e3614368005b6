"""Answers a file of rows with a registered model: `python -m deploy predict MODEL ROWS OUT --tier=TIER`."""

import dataclasses
import shlex
from collections.abc import Sequence
from functools import partial
from typing import Any

from deploy.api.request import verb_usage
from deploy.api.submit import check_wait, describe, new_submission
from deploy.cli.output import JSON
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
from trainer.base.settings.fields import fields_of, parse_options, setting


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictFlags(JobOptions):
    """Holds the flags of `predict`, and options of other jobs at their defaults."""

    model: str = setting(
        meaning="NAME, NAME@ALIAS or NAME@VERSION of the Model Registry", metavar="MODEL", positional=True
    )
    rows: str = setting(meaning="a file in a bucket, a line of JSON a row", metavar="ROWS", positional=True)
    out: str = setting(
        meaning="a folder in a bucket, for predictions-….jsonl and errors-….jsonl", metavar="OUT", positional=True
    )
    tier: str = setting(meaning="machine of one device, as cpu or l4x1", metavar="TIER")
    same_bytes: bool = setting(False, SAME_BYTES)
    dry_run: bool = setting(False, "print what would run and what it may cost, and stop")
    detach: bool = setting(False, "do not follow the job once it is submitted")
    json: bool = JSON


_NOT_OF_PREDICT = (
    "bucket", "package", "max_package_mb", "include", "script", "module", "image", "stop_if_idle", "stop_if_over",
    "plan", "force", "secret",
)  # fmt: skip
USAGE = verb_usage(
    "predict",
    "MODEL[@ALIAS] gs://…/ROWS.jsonl gs://…/OUT --tier=TIER",
    "Answers rows (JSON lines) with a registered model.",
)


def main(arguments: Sequence[str], session: Session = SESSION) -> int:
    """Submits one job and follows it to its end. Returns its exit code."""
    names = [name for name in fields_of(PredictFlags) if name not in _NOT_OF_PREDICT]
    args = parse_options(PredictFlags, arguments, USAGE, *names)
    rows, out = checked_address("rows", args.rows), checked_address("out", args.out)
    gcp = GcpConfig(needed_project(read_project(args.project)), needed_region(args.region), out)
    tier = load_tier(args.tier, args.prices, args)
    if tier.workers > 1 or tier.accelerators > 1:
        raise UserError(f"tier={tier.name}: one device answers rows, and it has {tier.devices}: use cpu or l4x1")
    check_wait(args.max_wait, tier, "detach" if args.detach else "")
    with api_errors(gcp):
        backend = session.open(args.backend, gcp.project, gcp.region)
        version = retried(lambda: find_version(args.model, backend), session.clock)
    about, inputs = f"answers the rows of {rows} with {version}", {"rows": rows, "model": version.artifact}
    work = Prediction(tier, args.same_bytes, job_dir=out, about=about, inputs=inputs)
    order = Order(
        dataclasses.replace(args, image=version.image), f"predict-{version.name.rsplit('/', 1)[-1]}", new_submission()
    )
    job = job_of(work, gcp, order)
    command = shlex.join([*USAGE.program.split(), *arguments])
    record = Submission(order.submission, command=command, sources=[str(version)])
    confirmation = partial(cost_confirmation, [(job.tier, 1)], [None], args, alternatives=True)
    return run(SubmittedJob([job], record, session, describe([job]), confirmation), args, "predict")
