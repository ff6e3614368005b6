"""Looks at what a job needs in Google Cloud before the first one is sent: `python -m deploy doctor
[TIER …]`."""

from collections.abc import Iterator, Sequence

from deploy.api.request import verb_usage
from deploy.base.console import say
from deploy.cli.output import JSON, write_document
from deploy.job.options import JobOptions
from deploy.platform.api_error import ApiError
from deploy.platform.errors import describe_error
from deploy.platform.readiness import Finding, findings
from deploy.platform.rest import Platform
from deploy.tiers.gcp_config import GcpConfig, read_project, read_region
from deploy.tiers.machine_table import load_machines
from deploy.tiers.tier import Tier, load_tier
from trainer.base.errors import DONE, USER_MUST_CHANGE
from trainer.base.settings.fields import options_class, parse_options, setting, setting_of
from trainer.base.storage.login import gcloud_account

USAGE = verb_usage(
    "doctor",
    "[TIER …] --bucket=gs://NAME",
    "Looks at login, project, APIs, roles, bucket and quota.",
)


@options_class
class DoctorFlags:
    """Holds the flags of `doctor`."""

    tiers: tuple[str, ...] = setting(
        (), "tiers whose quota is checked", metavar="TIER", positional=True
    )
    project: str = setting_of(JobOptions, "project")
    region: str = setting("", "as us-central1 (default: gcloud's ai/region)", "NAME")
    bucket: str = setting("", "the bucket of the jobs, as gs://NAME", "gs://NAME")
    json: bool = JSON


def main(arguments: Sequence[str]) -> int:
    """Prints the findings; returns 2 if something is bad."""
    args = parse_options(DoctorFlags, arguments, USAGE)
    tiers = [load_tier(name) for name in args.tiers]
    found = []
    for finding in examined(args, tiers):
        found.append(finding)
        say(str(finding))
    write_document(args, "doctor", findings=found)
    return USER_MUST_CHANGE if any(finding.state == "bad" for finding in found) else DONE


def examined(args: DoctorFlags, tiers: Sequence[Tier]) -> Iterator[Finding]:
    """Yields a finding about each thing that a job needs; stops without a login or project."""
    project = read_project(args.project)
    region = read_region(args.region)
    if not project:
        yield Finding("project", "bad", "none is named", "gcloud config set project ID")
        return
    if region not in load_machines().regions:
        text = f"{region} has no training of Vertex AI" if region else "none is named"
        yield Finding("region", "bad", text, "gcloud config set ai/region us-central1")
        return
    cloud = Platform(project, region)
    try:
        cloud.call("GET", f"{cloud.parent}/customJobs", params={"pageSize": 1})
    except ApiError as error:
        if error.code == 401:
            yield Finding(
                "login", "bad", "nobody is logged in, or the login has expired", error.login
            )
            return
        yield Finding(
            "region", "unknown" if error.transient else "bad", describe_error(error, cloud.gcp)
        )
    else:
        yield Finding("region", "good", f"Vertex AI answers in {region}")
    yield Finding("login", "good", gcloud_account() or "application default credentials")
    yield from findings(GcpConfig(project, region, args.bucket), tiers)
