"""Answers a file of rows with a registered model: `python -m deploy predict MODEL ROWS OUT --tier=TIER`."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deploy.api.arguments import add_flags, add_json_flag, command_line, parser
from deploy.api.submit import CHANGES, PreparedSubmission, check_wait, describe, new_submission, read_changes
from deploy.job.job import job_of
from deploy.job.ledger import Submission
from deploy.job.work import JobOptions, Work, Written
from deploy.platform.api import retried
from deploy.platform.clients import SESSION, Session
from deploy.platform.errors import api_errors
from deploy.platform.registry import find_version
from deploy.tiers.gcp_config import GcpConfig, checked_address, needed_project, needed_region, read_project
from deploy.tiers.images import Image
from deploy.tiers.tier import load_tier, read_labels
from trainer.base.errors import UserError


@dataclasses.dataclass(frozen=True)
class Prediction(Work):
    """Holds what is predicted: `model`, for people; the addresses of its files, of the rows and of the answers."""

    model: str
    artifact: str
    image: str
    rows: str
    out: str

    @property
    def job_dir(self) -> str:
        return self.out

    @property
    def inputs(self) -> Mapping[str, str]:
        return {"rows": self.rows, "model": self.artifact}

    @property
    def about(self) -> str:
        return f"answers the rows of {self.rows} with {self.model}"

    def arguments(self) -> list[str]:
        return [self.artifact, f"--rows_file={self.rows}", f"--out={self.out}"]

    def check_folder(self, job_dir: Path) -> None:
        raise UserError(f"out={job_dir}: use an address as gs://BUCKET/FOLDER")

    def in_job_dir(self, job_dir: str) -> "Prediction":
        return dataclasses.replace(self, out=job_dir)

    def choose_image(self, options: JobOptions) -> Image:
        return Image(self.image)

    def write(self, spec: dict[str, Any], gcp: GcpConfig, options: JobOptions, image: Image) -> Written:
        spec["workerPoolSpecs"][0].pop("pythonPackageSpec", None)
        spec["workerPoolSpecs"][0]["containerSpec"] = {
            "imageUri": image.uri, "command": ["python", "-m", "trainer.predict"], "args": self.arguments(),
        }  # fmt: skip
        return Written((), (f"runs in {image.uri}, the image of the version",), ())


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
    request = Prediction(tier, str(version), version.artifact, version.image, rows, out)
    options = JobOptions(
        f"predict-{version.name.rsplit('/', 1)[-1]}", new_submission(), max_cost=args.max_cost,
        max_wait_s=args.max_wait, labels=read_labels(args.labels), kms_key=args.kms_key,
    )  # fmt: skip
    job = job_of(request, gcp, options)
    record = Submission(options.submission, command=command_line("predict", arguments), sources=[str(version)])
    return PreparedSubmission(args, options, [job], record, session, describe([job])).run("predict")
