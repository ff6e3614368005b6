"""Where a job goes: project, region and bucket, from flags or from gcloud's own configuration."""

import argparse
import configparser
import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from trainer.errors import UserError
from trainer.storage import parse

_REGION = re.compile(r"[a-z]+-[a-z]+\d+")
_PROJECT = re.compile(r"[a-z0-9][a-z0-9.:-]*")  # an ID, old ones as example.com:my-project, or a number


@dataclasses.dataclass(frozen=True)
class GcpConfig:
    """`project` may be empty where nothing is sent; `bucket` is gs://name[/prefix], without a slash at its end."""

    project: str
    region: str
    bucket: str


def read_gcp_config(
    asked: argparse.Namespace, environment: Mapping[str, str] = os.environ, *, with_project: bool = False
) -> GcpConfig:
    """--project, --region, --bucket, or what gcloud is configured to; UserError for all that is missing or malformed.

    `with_project`: it may not be empty.
    """
    checked_project = needed_project if with_project else str
    reads: list[Callable[[], str]] = [
        lambda: needed_region(asked.region, environment),
        lambda: checked_address("bucket", asked.bucket),
        lambda: checked_project(read_project(asked.project, environment)),
    ]
    found, wrong = [], []
    for read in reads:
        try:
            found.append(read())
        except UserError as error:
            wrong.append(str(error))
    if wrong:
        raise UserError("; ".join(wrong))
    region, bucket, project = found
    return GcpConfig(project, region, bucket)


def needed_region(flag: str, environment: Mapping[str, str] = os.environ) -> str:
    """The flag, or gcloud's region; UserError where neither is set, or it looks like none."""
    region = read_region(flag, environment)
    if not region:
        raise UserError("region is missing: say --region=us-central1, or `gcloud config set ai/region us-central1`")
    return checked_region(region)


def read_region(flag: str, environment: Mapping[str, str] = os.environ) -> str:
    """The flag, or gcloud's region; empty where neither is set."""
    return flag or configured("ai", "region", environment) or configured("compute", "region", environment)


def read_project(flag: str, environment: Mapping[str, str] = os.environ) -> str:
    """The flag, or gcloud's project; empty where neither is set, UserError where it looks like none."""
    project = flag or configured("core", "project", environment)
    if project and not _PROJECT.fullmatch(project):
        raise UserError(
            f"project={project}: give its ID, of lower-case letters, digits and hyphens, as my-project-123: "
            "`gcloud projects list` shows it beside the name"
        )
    return project


def needed_project(project: str) -> str:
    """`project`; UserError where it is empty."""
    if not project:
        raise UserError("project is missing: say --project=ID, or `gcloud config set project ID`")
    return project


def checked_region(region: str) -> str:
    """`region`, if it looks like one; UserError otherwise."""
    if not _REGION.fullmatch(region):
        zone = re.fullmatch(rf"({_REGION.pattern})-[a-z]", region)
        cure = f"that is a zone: say --region={zone[1]}" if zone else "regions look like us-central1"
        raise UserError(f"region={region}: {cure}")
    return region


def checked_address(flag: str, address: str) -> str:
    """A gs:// address without a slash at its end, its bucket's name well formed; UserError otherwise."""
    if not address:
        raise UserError(f"{flag} is missing: say --{flag}=gs://NAME, a bucket of yours in the job's region")
    found = parse(address, flag)
    if found is None or "//" in address.removeprefix("gs://"):
        raise UserError(f"{flag}={address}: an address looks like gs://bucket or gs://bucket/folder")
    return str(found).rstrip("/")


def configured(section: str, key: str, environment: Mapping[str, str] = os.environ) -> str:
    """A property of gcloud's active configuration, read as gcloud reads it; empty where it is not set.

    The files are read, because asking gcloud takes half a second: https://cloud.google.com/sdk/docs/configurations
    """
    given = environment.get(f"CLOUDSDK_{section.upper()}_{key.upper()}")
    if given:
        return given
    home = Path(environment.get("APPDATA", Path.home())) / ("gcloud" if "APPDATA" in environment else ".config/gcloud")
    folder = Path(environment.get("CLOUDSDK_CONFIG") or home)
    properties = configparser.ConfigParser(interpolation=None)
    try:
        active = environment.get("CLOUDSDK_ACTIVE_CONFIG_NAME") or (folder / "active_config").read_text().strip()
        properties.read(folder / "configurations" / f"config_{active}")
    except (OSError, UnicodeDecodeError, configparser.Error):
        return ""
    return properties.get(section, key, fallback="")
