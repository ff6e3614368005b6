"""Turns a workload on a tier into a checked job that can be sent, or says why it could only
fail."""

import dataclasses
import getpass
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress

from deploy.job.ledger import attempt_label
from deploy.job.options import JobOptions
from deploy.job.spec import job_spec
from deploy.job.workload import UNREACHABLE, ScriptRun, Workload, warnings
from deploy.packaging.credentials import refuse_secret
from deploy.packaging.image_choice import choose_image, remembered
from deploy.packaging.packages import Package
from deploy.platform.vertex_api import CustomJob
from deploy.tiers.gcp_config import GcpConfig, check_region, checked_address
from deploy.tiers.machine_table import load_machines
from deploy.tiers.spec_rules import check_format, check_same_region, task_of
from deploy.tiers.tier import LABEL, PRICE_LABEL, USER_LABEL
from trainer.base.errors import UserError
from trainer.base.storage import output_address


class Job:
    """Represents a checked job: what runs on its tier, where, with which options and spec.

    `submission` names the job and its folder, unless the options do; `code`: the packages that the
    image may lack, the user's and the trainer's; `limits`: those at which the job ends itself, in
    the text of `trainer.base.limit_watch`. Raises UserError for a job that is known to fail,
    NoMachines if the region does not have the tier's accelerator.
    """

    def __init__(
        self,
        workload: Workload,
        gcp: GcpConfig,
        options: JobOptions,
        submission: str,
        code: Sequence[Package] = (),
        limits: str = "",
    ) -> None:
        self.workload = workload
        self.gcp = gcp
        self.options = options
        self.submission = submission
        self.code = code
        self.limits = limits
        # Whether it may be sent there, in this name, and with this key.
        check_region(workload.tier, gcp)
        if options.name and not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,99}", options.name):
            raise UserError(
                f"name={options.name}: use letters, digits, - _ and . only, at most 100: it names a"
                " folder too"
            )
        if options.kms_key:
            check_format("EncryptionSpec.kmsKeyName", options.kms_key, "kms_key")
            check_same_region("kms_key", options.kms_key, gcp.region)
        # No secret in its variables and arguments.
        for pool in workload.tier.spec["workerPoolSpecs"]:
            for variable in task_of(pool).get("env", []):
                name = variable["name"]
                value = variable.get("value", "")
                refuse_secret(f"{workload.tier.name}: env {name}", name, value)
        arguments = workload.arguments()
        for flag, word in zip(["", *arguments], arguments, strict=False):
            name, equals, value = word.partition("=")
            if not equals and flag.startswith("-") and not word.startswith("-"):
                name = flag
                value = word
            if value:
                refuse_secret(f"the argument {name}", name.lstrip("-"), value, by_name=False)
        # Its display name, and its job directory: gs://…
        subject = f"check-{workload.subject}" if options.check else workload.subject
        self.name = options.name or f"{subject}-{workload.tier.name}-{submission}"
        # The folder is named without the tier: the next one of a fallback resumes from the
        # checkpoints of the last.
        self.output = f"{gcp.bucket}/jobs/{options.name or f'{subject}-{submission}'}"
        in_file = workload.tier.spec.get("baseOutputDirectory", {}).get("outputUriPrefix", "")
        if workload.job_dir:
            address = output_address(workload.job_dir, "job_dir")
            if address is None:
                raise UserError(
                    f"job_dir={workload.job_dir}: {UNREACHABLE}: use --job_dir=gs://BUCKET/FOLDER,"
                    " or drop the flag"
                )
            self.output = checked_address("job_dir", str(address))
        elif in_file:
            self.output = checked_address("baseOutputDirectory", in_file)
        # Its image: the one that was built in this folder holds the trainer, so that no script runs
        # in it.
        built = None if options.image or isinstance(workload, ScriptRun) else remembered()
        self.image = choose_image(workload.tier, options.image, built, code)
        # Its spec, its machines under that spec, and the packages that are uploaded.
        self.spec, self.packages, program = job_spec(
            workload, options, gcp, self.image, code, self.output, limits
        )
        self.tier = dataclasses.replace(workload.tier, spec=self.spec)
        of_wheels = [line for package in self.packages for line in package.requires]
        self.requirements = (*program.requirements, *of_wheels)
        # Lines on its image, and what may be a mistake.
        about = "" if self.image.ready else program.about
        self.about = (*filter(None, [self.image.about, about]),)
        self.warnings = (*self._warnings(),)

    def named(self, submission: str, options: JobOptions | None = None) -> "Job":
        """Returns the same job as one of another submission, with other options if given."""
        options = options or self.options
        return Job(self.workload, self.gcp, options, submission, self.code, self.limits)

    def request(self, attempt: int = 1) -> CustomJob:
        """Returns the request that creates the job; a label unique to `attempt` finds it again."""
        labels = {}
        with suppress(OSError, KeyError):  # the account may have no name
            labels[USER_LABEL] = re.sub(r"[^a-z0-9_-]", "-", getpass.getuser().lower())[:63]
        labels |= {**self.options.labels, LABEL: attempt_label(self.submission, attempt)}
        if self.tier.price_per_hour is not None and not self.tier.resource:
            labels[PRICE_LABEL] = f"{self.tier.price_per_hour:.4f}".replace(".", "-")
        return CustomJob(self.name, self.spec, labels, self.options.kms_key)

    def _warnings(self) -> Iterator[str]:
        """Yields what may be a mistake: of its price, of its program, and of its machines."""
        priced = load_machines().region
        if self.tier.price.inferred and self.gcp.region != priced:
            yield (
                f"no price for {self.gcp.region}: that of {priced} is used: `python -m deploy"
                f" prices --region={self.gcp.region}` asks Google, and writes a file for --prices="
            )
        work = self.workload
        yield from warnings(work, json.dumps(self.spec))
        # The notes of the machine table that concern this job, recognised by a word in each.
        applies = {
            "recommended": self.tier.strategy == "STANDARD" and not self.options.reservation,
            "Arm": True,
            "/gcs": "/gcs/" in str(work.arguments()),
            "no bfloat16": work.trained and work.trained.precision == "mixed_bfloat16",
        }
        accelerator = load_machines().accelerators.get(self.tier.accelerator_type)
        for note in accelerator.note.split("; ") if accelerator else ():
            if any(word in note and applies[word] for word in applies):
                yield f"{self.tier.accelerator_type}: {note}"
