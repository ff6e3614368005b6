"""Answers a file of rows with a registered model: `python -m deploy predict MODEL ROWS OUT
--tier=TIER`."""

import dataclasses
import shlex
from collections.abc import Sequence
from functools import partial

from deploy.api.request import ANSWERS, verb_usage
from deploy.api.submit import SubmitOptions, check_wait, describe, new_submission, submission_of
from deploy.cli.output import JSON
from deploy.cli.submit import send_and_follow
from deploy.job.options import CodeOptions, JobOptions
from deploy.job.spec import machine_spec
from deploy.job.workload import Prediction
from deploy.planning.paid_jobs import paid_job
from deploy.platform.errors import api_errors
from deploy.platform.model_registry import find_version
from deploy.platform.rest import Platform
from deploy.platform.retries import retried
from deploy.tiers.gcp_config import (
    GcpConfig,
    checked_address,
    needed_project,
    needed_region,
)
from deploy.tiers.tier import load_tier
from trainer.base.errors import UserError
from trainer.base.settings.fields import (
    fields_of,
    flag_name,
    options_class,
    parse_options,
    setting,
    setting_of,
)


@options_class
class PredictFlags(JobOptions):
    """Holds the flags of `predict`, and options of other jobs at their defaults."""

    model: str = setting(
        meaning="NAME, NAME@ALIAS or NAME@VERSION of the Model Registry",
        metavar="MODEL",
        positional=True,
    )
    rows: str = setting(
        meaning="a file in a bucket, a line of JSON a row", metavar="ROWS", positional=True
    )
    out: str = setting(
        meaning="a folder in a bucket, for predictions-….jsonl and errors-….jsonl",
        metavar="OUT",
        positional=True,
    )
    tier: str = setting(meaning="machine of one device, as cpu or l4x1", metavar="TIER")
    dry_run: bool = setting(False, "print what would run and what it may cost, and stop")
    detach: bool = setting(False, "do not follow the job once it is submitted")
    again: bool = setting_of(SubmitOptions, "again")
    json: bool = JSON


_NOT_OF_PREDICT = (
    *fields_of(CodeOptions),
    "bucket",
    "image",
    "stop_if_idle",
    "stop_if_over",
    "plan",
    "secret",
)
USAGE = verb_usage(
    "predict",
    "MODEL[@ALIAS] gs://…/ROWS.jsonl gs://…/OUT --tier=TIER",
    "Answers rows (JSON lines) with a registered model.",
)


def main(arguments: Sequence[str]) -> int:
    """Submits one job and follows it to its end. Returns its exit code."""
    names = [name for name in fields_of(PredictFlags) if name not in _NOT_OF_PREDICT]
    args = parse_options(PredictFlags, arguments, USAGE, *names)
    rows = checked_address("rows", args.rows)
    out = checked_address("out", args.out)
    gcp = GcpConfig(needed_project(args.project), needed_region(args.region), out)
    tier = load_tier(args.tier, args.prices, partial(machine_spec, args))
    if tier.workers > 1 or tier.accelerators > 1:
        raise UserError(
            f"tier={tier.name}: one device answers rows, and it has {tier.devices}: use cpu or l4x1"
        )
    check_wait(args.max_wait, tier, "detach" if args.detach else "")
    with api_errors(gcp):
        backend = Platform(gcp.project, gcp.region)
        version = retried(lambda: find_version(args.model, backend))
    about = f"answers the rows of {rows} with {version}"
    inputs = {"rows": rows, "model": version.artifact}
    subject = f"predict-{version.name.rsplit('/', 1)[-1]}"
    work = Prediction(tier, job_dir=out, subject=subject, about=about, inputs=inputs)
    options = dataclasses.replace(args, image=version.image)
    job = paid_job(work, gcp, options, new_submission())
    words = [word for word in arguments if flag_name(word) not in ANSWERS]
    command = shlex.join([*USAGE.program.split(), *words])
    submission = submission_of([job], describe([job]), [str(version)], command, args)
    return send_and_follow(submission, args, "predict")
