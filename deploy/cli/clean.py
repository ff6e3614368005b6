"""Lists, and with --yes removes, what ended jobs left in a bucket beside their results: `python -m
deploy clean`.

That is what they read to start, below BUCKET/packages/: the trainer, a package or script of yours,
the bootstrap. It counts as left if a job of the project that has ended names it, and none that goes
on, nor a tuning job, in any region, nor a submission of the last hour; jobs of another project that
uses the bucket are not seen. Results, checkpoints and data are never looked at. A later job uploads
again what it needs; a spec of `submit --out` that was not sent yet does not.

Images of --image=auto that no job of the last 30 days used are listed with the command that deletes
them.
"""

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from deploy.api.request import verb_usage
from deploy.base.console import say
from deploy.cli.output import JSON, write_document
from deploy.job.options import JobOptions
from deploy.platform import buckets
from deploy.platform.api_error import ApiError
from deploy.platform.automatic_image import automatic_images
from deploy.platform.errors import api_errors
from deploy.platform.rest import Platform
from deploy.platform.retries import CLOCK, retried
from deploy.platform.vertex_api import FINAL_STATES, parse_time
from deploy.tiers.gcp_config import GcpConfig, checked_address, needed_project
from deploy.tiers.machine_table import load_machines
from trainer.base.errors import DONE
from trainer.base.settings.fields import options_class, parse_options, setting, setting_of
from trainer.base.storage.gcs import connect

UNUSED_S = 30 * 24 * 3600.0
SENDING_S = 3600.0  # a submission touches its packages, and creates its job well within this time


@options_class
class CleanFlags:
    """Holds the flags of `clean`."""

    project: str = setting_of(JobOptions, "project")
    bucket: str = setting_of(JobOptions, "bucket")
    yes: bool = setting(False, "remove it")
    json: bool = JSON


def main(arguments: Sequence[str]) -> int:
    """Prints what is left, a line for each package, and removes it with --yes."""
    args = parse_options(
        CleanFlags, arguments, verb_usage("clean", "--bucket=gs://NAME [--yes]", __doc__)
    )
    project = needed_project(args.project)
    packages = f"{checked_address('bucket', args.bucket)}/packages/"

    recent = CLOCK.now() - UNUSED_S

    def named_packages(place: tuple[str, str]) -> tuple[set[str], set[str], set[str]]:
        """Returns the packages that jobs of a region and kind name: ended jobs, and all others;
        then the texts of recent jobs."""
        region, kind = place
        of_ended = set[str]()
        of_others = set[str]()
        texts = set[str]()
        with api_errors(GcpConfig(project, region, "")):
            backend = Platform(project, region)
            for job in retried(lambda: [*backend.listed(f"{backend.parent}/{kind}", kind)]):
                ended = (
                    kind == "customJobs" and job["state"].removeprefix("JOB_STATE_") in FINAL_STATES
                )
                names = of_ended if ended else of_others
                text = json.dumps(job)
                names.update(re.findall(rf"{re.escape(packages)}([^/]+)/", text))
                if not ended or (parse_time(job["createTime"]) or 0.0) > recent:
                    texts.add(text)
        return of_ended, of_others, texts

    def old_images(region: str) -> list[Mapping[str, Any]]:
        """Returns the images of --image=auto in a region that were made before that time."""
        try:
            found = automatic_images(GcpConfig(project, region, ""))
        except ApiError:  # no repository, as a rule
            return []
        return [image for image in found if (parse_time(image["uploadTime"]) or 0.0) < recent]

    with ThreadPoolExecutor(8) as threads:
        places = itertools.product(
            load_machines().regions, ("customJobs", "hyperparameterTuningJobs")
        )
        by_place = threads.map(named_packages, places)
        of_ended, in_use, texts = (
            set[str]().union(*names) for names in zip(*by_place, strict=True)
        )
        images = itertools.chain(*threads.map(old_images, load_machines().regions))
        used = " ".join(texts)
        unused = [image for image in images if image["uri"] not in used]
    sizes = dict.fromkeys(sorted(of_ended - in_use), 0)
    for listed in buckets.below(packages):
        name = listed.address.name.split("/")[-2]
        item = connect().get(listed.address) if name in sizes else None  # a listing has no times
        if item and item.updated and CLOCK.now() - item.updated.timestamp() > SENDING_S:
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
    for image in unused:
        say(
            f"{int(image['imageSizeBytes']) / 1e6:9.2f} MB  no job of the last 30 days used it:"
            f" `gcloud artifacts docker images delete {image['uri']} --delete-tags`"
        )
    write_document(
        args,
        "clean",
        removed=args.yes,
        packages=[{"address": f"{packages}{name}", "bytes": size} for name, size in left.items()],
        images=[
            {"address": image["uri"], "bytes": int(image["imageSizeBytes"])} for image in unused
        ],
    )
    return DONE
