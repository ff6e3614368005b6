"""Prints the spec that `gcloud ai custom-jobs create --config` takes: `python -m deploy render TIER --recipe=…`."""

import shlex
import sys
from collections.abc import Sequence

from deploy.client.arguments import parse_program, parser
from deploy.client.job_flags import add_job_flags, package_command, read_changes, read_options
from deploy.tiers.gcp_config import read_gcp_config
from deploy.tiers.job_spec import render, request_on, to_yaml
from deploy.tiers.tier import read_tiers_or_machine
from trainer.base.errors import DONE, UserError


def main(arguments: Sequence[str]) -> int:
    """Prints the spec on stdout, and on stderr warnings and the command that uploads its packages."""
    cli = parser(
        "render",
        "Prints the full CustomJobSpec of a tier and the trainer's flags.",
        "TIER --recipe=NAME --bucket=gs://… [any trainer flag]",
    )
    add_job_flags(cli)
    args, program = parse_program(cli, arguments)
    changes = read_changes(args)
    tier, *more = read_tiers_or_machine(args.tiers, args.machine_type, args.accelerator, args.prices, changes)
    if more:
        raise UserError(f"a spec is of one tier: render {tier.name} and {more[0].name} one after another")
    options = read_options(args, program)
    request = request_on(tier, program)  # mistakes in the command come before those of the account
    job = render(request, read_gcp_config(args), options)
    about = filter(None, (package.about for package in job.packages))
    for line in (*about, *job.about, *(f"warning: {line}" for line in job.warnings)):
        print(line, file=sys.stderr)
    upload = package_command(job, args)
    if upload:
        print(f"upload the packages that the spec names first: {upload}", file=sys.stderr)
    beside = [f"--labels={args.labels}"] if options.labels else []
    beside += [f"--kms-key={options.kms_key}"] if options.kms_key else []
    if beside:
        print(f"a spec has neither labels nor a key: create the job with {shlex.join(beside)}", file=sys.stderr)
    print(to_yaml(job.spec), end="")
    return DONE
