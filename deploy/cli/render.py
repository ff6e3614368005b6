"""`python -m deploy render TIER --recipe=… > job.yaml`: the spec that `gcloud ai custom-jobs create --config` takes."""

import sys
from collections.abc import Sequence

from deploy.cli.arguments import parse, parser
from deploy.cli.job_flags import add_job_flags, new_submission, package_command, read_job
from deploy.spec.checks import sent_to_the_cloud
from deploy.spec.gcp_config import read_gcp_config
from deploy.spec.job_spec import settings_on, to_yaml
from deploy.spec.tier import load_tier
from trainer.errors import DONE


def main(arguments: Sequence[str]) -> int:
    """Prints the spec on stdout; on stderr warnings, and how the packages that it names get to their addresses."""
    own = parser(
        "render",
        "Prints the full CustomJobSpec of a tier and the trainer's flags.",
        "TIER --recipe=NAME --bucket=gs://… [any trainer flag]",
    )
    add_job_flags(own)
    asked, flags = parse(own, arguments)
    tier = load_tier(asked.tier, asked.prices)
    with sent_to_the_cloud():
        settings_on(tier, flags)  # mistakes of the command itself are told before what depends on the account
    job = read_job(asked, flags, read_gcp_config(asked), tier, new_submission())
    for line in job.warnings:
        print(f"warning: {line}", file=sys.stderr)
    sending = package_command(job, asked.package)
    if sending:
        print(f"the packages that the spec names have to be sent first: {sending}", file=sys.stderr)
    print(to_yaml(job.spec), end="")
    return DONE
