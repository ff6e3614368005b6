"""Lists, and with --yes removes, what ended jobs left in a bucket beside their results: `python -m
deploy clean`.

That is what they read to start, below BUCKET/packages/: the trainer, a package or script of yours,
the starter. It counts as left if a job of the project that has ended names it, and none that goes
on, nor a tuning job, in any region, nor a submission of the last hour; jobs of another project that
uses the bucket are not seen. Results, checkpoints and data are never looked at. A later job uploads
again what it needs; a spec of `submit --out` that was not sent yet does not.
"""

import itertools
import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from deploy.api.request import verb_usage
from deploy.base.console import say
from deploy.cli.output import JSON, write_document
from deploy.job.options import JobOptions
from deploy.platform import buckets
from deploy.platform.errors import api_errors
from deploy.platform.gcloud_and_sdk import SESSION, Session
from deploy.platform.retries import retried
from deploy.platform.vertex_api import FINAL_STATES
from deploy.tiers.gcp_config import GcpConfig, checked_address, needed_project, read_project
from deploy.tiers.machine_table import load_machines
from trainer.base.errors import DONE
from trainer.base.settings.fields import parse_options, setting, setting_of
from trainer.base.storage.gcs import connect

SENDING_S = 3600.0  # a submission touches its packages, and creates its job well within this time


@dataclass(frozen=True, kw_only=True)
class CleanFlags:
    """Holds the flags of `clean`."""

    project: str = setting_of(JobOptions, "project")
    bucket: str = setting_of(JobOptions, "bucket")
    yes: bool = setting(False, "remove it")
    json: bool = JSON


def main(arguments: Sequence[str], session: Session = SESSION) -> int:
    """Prints what is left, a line for each package, and removes it with --yes."""
    args = parse_options(
        CleanFlags, arguments, verb_usage("clean", "--bucket=gs://NAME [--yes]", __doc__)
    )
    project = needed_project(read_project(args.project))
    packages = f"{checked_address('bucket', args.bucket)}/packages/"

    def named_packages(place: tuple[str, str]) -> tuple[set[str], set[str]]:
        """Returns the packages that jobs of a region and kind name: ended jobs, and all others."""
        region, kind = place
        of_ended = set[str]()
        of_others = set[str]()
        with api_errors(GcpConfig(project, region, "")):
            backend = session.open("sdk", project, region)
            for job in retried(
                lambda: [*backend.listed(f"{backend.parent}/{kind}", kind)], session.clock
            ):
                ended = (
                    kind == "customJobs" and job["state"].removeprefix("JOB_STATE_") in FINAL_STATES
                )
                names = of_ended if ended else of_others
                names.update(re.findall(rf"{re.escape(packages)}([^/]+)/", json.dumps(job)))
        return of_ended, of_others

    with ThreadPoolExecutor(8) as threads:
        places = itertools.product(
            load_machines().regions, ("customJobs", "hyperparameterTuningJobs")
        )
        by_place = threads.map(named_packages, places)
        of_ended, in_use = (set[str]().union(*names) for names in zip(*by_place, strict=True))
    sizes = dict.fromkeys(sorted(of_ended - in_use), 0)
    for listed in buckets.below(packages):
        name = listed.address.name.split("/")[-2]
        item = connect().get(listed.address) if name in sizes else None  # a listing has no times
        if item and item.updated and session.clock.now() - item.updated.timestamp() > SENDING_S:
            sizes[name] += item.size
            if args.yes:
                connect().delete(item)
    left = {name: size for name, size in sizes.items() if size}
    for name, size in left.items():
        say(f"{size / 1e6:9.2f} MB  {packages}{name}")
    total = f"{sum(left.values()) / 1e6:.2f} MB of {len(left)} packages that only ended jobs name"
    say(
        f"{'removed' if args.yes else 'found'}"
        f" {total}{'' if args.yes or not left else ': --yes removes them'}"
    )
    write_document(
        args,
        "clean",
        removed=args.yes,
        packages=[{"address": f"{packages}{name}", "bytes": size} for name, size in left.items()],
    )
    return DONE
