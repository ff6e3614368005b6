"""Submits jobs: checks the command, says what it means, creates the job, and goes on where there are no machines."""

import argparse
import dataclasses
import math
import re
import secrets
import shlex
import signal
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TextIO

from deploy.api.arguments import add_flags, add_json_flag, command_line, parse_program, parser, write_document
from deploy.api.call_arguments import FlagValue, as_arguments
from deploy.api.jobs import VertexJob
from deploy.job.cost import price_and_limit
from deploy.job.creation import check_resources, look_for, submit_job, upload_packages
from deploy.job.following import PrintLine, show, watch_job
from deploy.job.job import Job, Program, job_of, work_on
from deploy.job.ledger import Submission, attempt_label, find_interrupted
from deploy.job.script import Script
from deploy.job.work import CHECK_S, CREATE, JobOptions, with_tensorboard
from deploy.planning.cost_rule import CostQuestion, cost_question
from deploy.planning.kept_plans import FIT, cheapest_lever, cost_lines, memory_lines, plan_of, with_limits
from deploy.platform.api import ApiError, JobStatus
from deploy.platform.clients import SESSION, Gcloud, Session, to_yaml
from deploy.platform.errors import api_errors, exit_code, stocked_out
from deploy.platform.local import on_signals
from deploy.platform.registry import checked_name, read_registration, register_run, serving_image
from deploy.tiers.gcp_config import NoMachines, needed_project, read_gcp_config, regions_in
from deploy.tiers.images import check_asked_image, installs, remembered
from deploy.tiers.output import forget_stdout, printed_on, say
from deploy.tiers.packages import Package, packages_with
from deploy.tiers.tier import (
    SpecChanges,
    Tier,
    one_machine,
    read_labels,
    read_secrets,
    read_tiers_or_machine,
    read_variables,
)
from trainer.base.errors import DONE, INTERRUPTED, UserError
from trainer.base.run_files.records import GPU_CHECK
from trainer.base.settings.fields import Parser
from trainer.base.storage import local_path, make_writable, write_whole

# Flags that change any tier, for `read_changes`, and the labels and the key of its jobs.
CHANGES = (
    "timeout", "flex_start", "spot", "disk_gb", "reservation", "labels", "kms_key", "service_account", "network",
    "env", "web_access",
)  # fmt: skip
# Flags of jobs of Vertex AI, wherever they are submitted from.
OF_VERTEX = (
    "project", "region", "bucket", "package", "image", "max_cost", "stop_if_idle", "stop_if_over", "max_wait",
    *CHANGES, "secret", "backend",
)  # fmt: skip


def read_changes(args: argparse.Namespace) -> SpecChanges:
    """Returns what the flags change in the spec of every tier. Raises UserError if they contradict each other."""
    kinds = [name for name in ("spot", "flex_start", "reservation") if getattr(args, name)]
    if len(kinds) > 1:
        raise UserError(f"--{kinds[0]} and --{kinds[1]} contradict each other: a job has machines of one kind")
    if args.reservation and not re.fullmatch(r"projects/[^/]+/zones/[a-z0-9-]+/reservations/[^/]+", args.reservation):
        raise UserError(f"reservation={args.reservation}: write projects/PROJECT/zones/ZONE/reservations/NAME")
    env, secret = read_variables(args.env), read_secrets(getattr(args, "secret", []))
    return SpecChanges(
        args.service_account, args.network, args.spot, args.flex_start, args.timeout, args.disk_gb,
        args.reservation, args.web_access, env, secret,
    )  # fmt: skip


def add_plan_flags(cli: Parser) -> None:
    """Declares the flags by which a job is held against its plan before it is sent."""
    cli.add_boolean("plan", "first measure on this machine's CPU whether the run fits the memory, if nobody did yet")
    cli.add_boolean("force", "send a job that does not fit the memory by its plan, or a script that imports "
                    "what its image has not")  # fmt: skip


def read_options(args: argparse.Namespace, program: Program) -> JobOptions:
    """Returns the options of a new submission, its packages read. Raises UserError if they do not fit."""
    check_asked_image(args.image)
    if args.name and not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,99}", args.name):
        raise UserError(f"name={args.name}: use letters, digits, - _ and . only, at most 100: it names a folder too")
    own_image = args.image != "" and not installs(args.image)
    if isinstance(program, Script):
        subject = program.subject
        packages: Sequence[Package] = [program.package(args.max_package_mb)]
    elif own_image and args.package:
        raise UserError("--image and --package contradict each other: build the package into the image")
    else:
        packages = [] if own_image else packages_with(args.package, args.max_package_mb)
        subject = str(program.values.get("recipe") or program.values.get("model") or "job")
        subject = subject.rsplit("/", 1)[-1].removesuffix(".yaml").replace("_", "-").replace(":", "-")
    return JobOptions(
        subject, new_submission(), args.name, tuple(packages), args.image, None if args.image else remembered(),
        args.max_cost, args.max_wait, args.disable_retries, read_labels(args.labels), args.kms_key,
        tensorboard=getattr(args, "tensorboard_instance", ""),
        force=getattr(args, "force", False), stop_if_idle_s=args.stop_if_idle, stop_if_over=args.stop_if_over,
        plan=getattr(args, "plan", "") is True,
    )  # fmt: skip


def new_submission() -> str:
    """Returns a unique name for a submission that can be a label: time and random digits."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


FLEX_START_SLACK_S = 600.0  # for the service to end a wait by itself
# Flags with which a job is not followed: of several, the next could not be tried, and nobody ends a wait for machines.
_UNFOLLOWED = {
    "detach": "whether it has machines is known only later", "spec": "a spec has one job", "out": "a spec has one job",
}  # fmt: skip


class SubmittedJob(VertexJob):
    """Represents the newest job of a submission; where there are no machines for it, `wait` goes on with the next."""

    def __init__(
        self, record: Submission, jobs: Sequence[Job], backend: str, session: Session,
        max_wait_s: float | None = None, register: tuple[str, str] = ("", ""),
    ) -> None:  # fmt: skip
        self.record, self.rendered, self._next, self._max_wait_s = record, jobs[0], list(jobs[1:]), max_wait_s
        self._register = register  # the name of a model, and the image that serves it
        super().__init__("", jobs[0].gcp, backend, session, None)

    def create(self) -> None:
        """Creates the job, or the next one for which there are machines. Raises as `submit_job` does."""
        while True:
            try:
                name = submit_job(self.rendered, self.record, partial(self.session.open, self.kind), self.session.clock)
                self.resume(name)
                return
            except KeyboardInterrupt:
                if self.record.attempts[-1].state == "INTERRUPTED":  # the job was created and goes on
                    self.resume(self.record.attempts[-1].job)
                raise
            except ApiError as error:
                if not (error.unavailable and self._next):
                    raise
            self._turn()

    def resume(self, name: str) -> None:
        """Takes the job with this name for that of the record's last attempt."""
        attempt = self.record.attempts[-1]
        self.name, self.attempt = name, (self.record, attempt)
        self.gcp = dataclasses.replace(self.rendered.gcp, project=attempt.project, region=attempt.region)

    def follow(self, print_line: PrintLine = show) -> JobStatus | None:
        """Waits as `wait` does, and prints as a command; returns None after Ctrl-C."""
        with api_errors(self.gcp):
            while status := self._follow_newest(print_line):
                if not (self._next and stocked_out(status)):
                    break
                self._turn()
                try:
                    self.create()
                except KeyboardInterrupt:
                    if self.record.attempts[-1].state != "INTERRUPTED":
                        raise
                    return None
            name, image = self._register
            if status and name and exit_code(status) == DONE:
                registration = read_registration(self.output, name, image, self.gcp, self.name)
                register_run(registration, "", self.backend, self.session.clock)
        return status

    def _follow_newest(self, print_line: PrintLine) -> JobStatus | None:
        attempt, max_wait_s = self.record.attempts[-1], self._max_wait_s or math.inf
        if self.rendered.tier.strategy == "FLEX_START":  # the service ends the wait itself
            max_wait_s += FLEX_START_SLACK_S
        status = watch_job(self.backend, attempt.job, self.gcp, self.session.clock, print_line, created=True,
                           max_wait_s=max_wait_s)  # fmt: skip
        if status is None:
            attempt.state = "INTERRUPTED"
            self.record.write()
            return None
        self.name = attempt.job = status.name
        self.record.record_status(attempt, status, self.session.clock.now())
        return status

    def _turn(self) -> None:
        say(f"{self.rendered.name}: {self.record.attempts[-1].error}", "tries the next")
        self.rendered = self._next.pop(0)


def submit_flags() -> Parser:
    """Returns the parser of `submit`."""
    cli = parser(
        "submit",
        "Submits a job to Vertex AI and follows it to its end.",
        "TIER … --recipe=NAME --data=gs://… --bucket=gs://… [any trainer flag]",
    )
    cli.add_argument("tiers", nargs="*", metavar="TIER", help="a file such as job_configs/l4x4.yaml, or its bare name, "
                     "l4x4; of several the next is tried where there are no machines")  # fmt: skip
    cli.add_argument("--machine_type", default="", metavar="NAME", help="a machine instead of a TIER, as g2-standard-4")
    cli.add_argument("--accelerator", default="", metavar="NAME[:COUNT]", help="its accelerators, as NVIDIA_L4:1")
    add_flags(cli, *OF_VERTEX, "max_package_mb", "prices", "script", "module")
    cli.add_argument("--name", default="", metavar="TEXT", help="display name (default: recipe, tier and time)")
    cli.add_argument("--tensorboard_instance", default="", metavar="NAME", help="the TensorBoard of Vertex AI that "
                     "shows the job's logs/: its full name or id, or `create`; it costs by what it stores")  # fmt: skip
    cli.add_boolean("disable_retries", "no restart on failure, as measurements need it")
    add_plan_flags(cli)
    cli.add_boolean("fit", FIT)
    cli.add_boolean("dry_run", "print what would run and what it may cost, and stop")
    cli.add_argument("--spec", action="store_true", help="print the job's spec, as `gcloud ai custom-jobs create "
                     "--config` takes it, and stop; the text is on stderr")  # fmt: skip
    cli.add_argument("--out", default="", metavar="FILE", help="write the job's spec to FILE, upload its packages, "
                     "print the gcloud command that sends it, and stop")  # fmt: skip
    cli.add_boolean("check", "check the tier's GPUs (trainer.check --on_gpus) instead of training: some minutes")
    cli.add_boolean("detach", "do not follow the job once it is submitted")
    cli.add_argument("--register", default="", metavar="NAME", help="make the model a version of NAME in the Model "
                     "Registry when the job has ended well (docs/serving.md)")  # fmt: skip
    add_json_flag(cli)
    return cli


@dataclasses.dataclass(frozen=True)
class PreparedSubmission:
    """Holds a submission that was checked: a job for each tier in each region, in the order in which they are tried.

    `about`: lines for people; `register`: the name of a model, and the image that serves it.
    """

    args: argparse.Namespace
    options: JobOptions
    jobs: Sequence[Job]
    record: Submission
    session: Session
    about: Sequence[str]
    register: tuple[str, str] = ("", "")

    def run(self, verb: str) -> int:
        """Submits and follows the job as a verb does, or shows it with --dry_run; returns the exit code."""
        args = self.args
        say(*self.about)
        if args.dry_run:
            asked = self._question().lines()
            say(*asked, "nothing was sent: the same command without --dry_run checks login, bucket, data and quota, "
                        "and sends it")  # fmt: skip
            self._write_requests(verb, self.jobs, [*self.about, *asked])
            return DONE
        with on_signals(signal.default_int_handler, signal.SIGTERM):  # as Ctrl-C
            job, code = self.send(), DONE
            if args.detach:
                say(f"watch it: python -m deploy watch {job.name}")
            else:
                status = job.follow()
                code = exit_code(status) if status else INTERRUPTED
        try:
            write_document(args, verb, submission=job.record.submission, job=job.name, attempts=job.record.attempts,
                           exit_code=code)  # fmt: skip
        except BrokenPipeError:  # the exit code of the job counts, whether or not anybody reads on
            forget_stdout()
        return code

    def print_spec(self) -> int:
        """Prints the spec of the job, and nothing else on stdout; returns the exit code."""
        say(*self.about, "nothing was sent or uploaded, and a spec has neither labels nor a key: --out=FILE uploads, "
                         "and prints the whole command")  # fmt: skip
        print(to_yaml(self.jobs[0].spec), end="", flush=True)
        return DONE

    def stage(self) -> int:
        """Writes the spec of the job to a file, uploads its packages and prints the command that sends it."""
        job, file = self.jobs[0], local_path(self.args.out, "out")
        make_writable(file.parent, "out")
        say(*self.about)
        check_resources(job)
        upload_packages(job.packages, job.gcp.bucket)
        request = job.request(attempt_label(self.record.submission))
        request = dataclasses.replace(request, spec=with_tensorboard(job.spec, job.gcp))
        write_whole(file, to_yaml(request.spec))
        command = Gcloud(job.gcp.project, job.gcp.region).create_command(request, self.args.out)
        say(f"nothing was sent: {self.args.out} has the spec, and this command sends it:", shlex.join(command))
        self._write_requests("submit", [job], self.about)
        return DONE

    def _question(self) -> CostQuestion:
        return cost_question([(job, 1) for job in self.jobs], self.args.max_cost, alternatives=True)

    def _write_requests(self, verb: str, jobs: Sequence[Job], about: Sequence[str]) -> None:
        label = attempt_label(self.record.submission)
        write_document(self.args, verb, requests=[_as_document(job, label) for job in jobs], about=about)

    def send(self) -> SubmittedJob:
        """Creates the job, or finds the one that an interrupted call with the same arguments created.

        Raises UserError if it may cost much, without --max_cost, and nobody agrees.
        """
        jobs = self.jobs
        with api_errors(jobs[0].gcp):
            if interrupted := self._interrupted():
                return interrupted
            self._question().agree()
            for job in jobs:
                check_resources(job)
            packages = {package.uri(job.gcp.bucket): package for job in jobs for package in job.packages}
            upload_packages(list(packages.values()), jobs[0].gcp.bucket)
            submitted = self._submitted(self.record, jobs)
            submitted.create()
            return submitted

    def _submitted(self, record: Submission, jobs: Sequence[Job]) -> SubmittedJob:
        return SubmittedJob(record, jobs, self.args.backend, self.session, self.args.max_wait, self.register)

    def _interrupted(self) -> SubmittedJob | None:
        """Returns the job of the same command that was not followed to its end; None if there is none.

        It goes on with the tiers and regions after that job's own.
        """
        earlier = find_interrupted(self.record.command, self.record.sources)
        if earlier is None:
            return None
        attempt = earlier.attempts[-1]
        backend = self.session.open(self.args.backend, attempt.project, attempt.region)
        attempt.job = attempt.job or look_for(earlier.label, backend, self.session.clock, attempt.sent_at)
        if not attempt.job:
            return None
        say(f"goes on with {attempt.job}, which the same command submitted before")
        if earlier.detached:
            attempt.state = "SUBMITTED"
            earlier.write()
        options = dataclasses.replace(self.options, submission=earlier.submission)
        places = [(job.tier.name, job.gcp.region) for job in self.jobs]
        place = (attempt.tier, attempt.region)
        left = self.jobs[places.index(place) :] if place in places else self.jobs[:1]
        jobs = [job_of(job.work, job.gcp, with_limits(job.work, options)) for job in left]
        submitted = self._submitted(earlier, jobs)
        submitted.resume(attempt.job)
        return submitted


def prepare(arguments: Sequence[str], session: Session) -> PreparedSubmission:
    """Returns what `submit` was asked for, checked. Raises UserError for what could be known to fail."""
    args, program = parse_program(submit_flags(), arguments)
    for one, other, reason in (
        ("spec", "json", "both are all of stdout, and the document has the spec"),
        ("spec", "out", "the one prints what the other writes"),
        ("dry_run", "out", "a dry run uploads nothing"),
    ):
        if getattr(args, one) and getattr(args, other):
            raise UserError(f"--{one} and --{other} contradict each other: {reason}: drop one of them")
    if args.spec and args.tensorboard_instance == CREATE:
        raise UserError("--spec needs the name of the TensorBoard: use --out=FILE, which makes one")
    register = ("", "")
    if args.register:
        if args.detach or args.spec or args.out or args.check or isinstance(program, Script):
            raise UserError("--register needs a training that is followed to its end: drop --detach, --spec, --out, "
                            "--check or --script")  # fmt: skip
        register = checked_name(args.register), serving_image("" if installs(args.image) else args.image)
    if args.check and not program.values.keys() & {"recipe", "model"}:
        program = program.replace(recipe="wgan_gp_digits")  # a small one, whose data are in the package
    options = read_options(args, program)
    if args.check:
        options = dataclasses.replace(options, subject=f"check-{options.subject}", check=True)
    jobs = _candidates(args, program, options)
    sources = list(dict.fromkeys(package.uri(job.gcp.bucket) for job in jobs for package in job.packages))
    record = Submission(options.submission, command=command_line("submit", arguments), sources=sources)
    runs = [] if args.check else [job.work for job in jobs]
    memory = memory_lines(runs, plan=args.plan, force=args.force)  # which makes the plans that are missing
    about = [*describe(jobs), *memory]
    return PreparedSubmission(args, options, jobs, record, session, about, register)


def submit(
    *tiers: str, recipe: str = "", bucket: str = "", max_cost: float | None = None,
    settings: Mapping[str, FlagValue] | None = None, stream: TextIO | None = None, session: Session = SESSION,
    **flags: FlagValue,
) -> SubmittedJob:  # fmt: skip
    """Submits one job, on the first tier and region with machines for it, and returns it as soon as it is created.

    `settings`: of the trainer, as learning_rate; `flags`: those of `python -m deploy submit`, as region or spot=True;
    `max_cost`: USD. Lines about the job go to `stream`. Raises UserError for what the command would refuse, or ask
    about: what may cost more than 50 USD by its plan, or 500 without one, needs a max_cost. Raises PlatformFault if the
    service fails; its exit code 69 says that the job may exist.
    """
    named = {"recipe": recipe, "bucket": bucket, "max_cost": max_cost, **flags}
    if shown := {"spec", "out"} & {*named, *(settings or {})}:
        raise UserError(f"{min(shown)} is of the command, which prints: python -m deploy submit …")
    with printed_on(stream):
        return prepare(as_arguments(tiers, named, settings), session).send()


def _candidates(args: argparse.Namespace, program: Program, options: JobOptions) -> list[Job]:
    """Returns a checked job for every tier in every region, in the order in which they are tried."""
    tiers = read_tiers_or_machine(args.tiers, args.machine_type, args.accelerator, args.prices, read_changes(args))
    regions = regions_in(args.region)
    unfollowed = next((flag for flag in _UNFOLLOWED if getattr(args, flag)), "")
    if unfollowed and len(tiers) * len(regions) > 1:
        raise UserError(f"--{unfollowed} is for one tier in one region: {_UNFOLLOWED[unfollowed]}")
    jobs, left_out = list[Job](), list[tuple[str, NoMachines]]()
    for tier in tiers:
        # Mistakes in the command come before those of the account.
        fitting = program
        if args.fit and not args.check and not isinstance(program, Script):
            config = program.resolve()
            if lever := cheapest_lever(tier, plan_of(config, program), config):
                fitting = program.replace(**{lever.name: lever.value})
        request = work_on(one_machine(tier, CHECK_S) if args.check else tier, fitting)
        # The default, a GAN on digits, is for trying things out: somebody, or the tier's file, names what is paid for.
        task = request.tier.spec["workerPoolSpecs"][0]
        arguments = (task.get("pythonPackageSpec") or task.get("containerSpec") or {}).get("args", [])
        in_file = {argument.partition("=")[0].removeprefix("--") for argument in arguments}
        if request.training and not {"recipe", "model"} & {*request.training.overrides.values, *in_file}:
            raise UserError("recipe is missing: a job is paid for: name what it trains, by --recipe= or --model=")
        for region in regions:
            gcp = read_gcp_config(argparse.Namespace(**{**vars(args), "region": region}))
            try:
                jobs.append(job_of(request, gcp, with_limits(request, options)))
            except NoMachines as error:
                left_out.append((f"{tier.name} in {gcp.region}", error))
    for place, reason in left_out if jobs else left_out[:-1]:
        say(f"# left out: {place}: {reason}")
    if not jobs:
        raise left_out[-1][1]
    needed_project(jobs[0].gcp.project)
    check_wait(args, jobs[0].tier, unfollowed)
    return jobs


def check_wait(args: argparse.Namespace, tier: Tier, unfollowed: str) -> None:
    """Raises UserError if nobody would cancel a job of the tier that waits for machines longer than --max_wait.

    `unfollowed`: the flag with which the job is not followed, if any.
    """
    if unfollowed and args.max_wait and tier.strategy != "FLEX_START":
        raise UserError(f"--{unfollowed} contradicts --max_wait: nobody would cancel the job then: drop one of them")


def describe(jobs: Sequence[Job]) -> list[str]:
    """Returns what people want to know of jobs: what runs, on what, in which image, where to, what it costs.

    A line that is the same for all stands once.
    """
    check = f"trains nothing: checks the accelerators of one machine ({GPU_CHECK}, docs/gpus.md)"
    lines = [check if job.options.check else job.work.about for job in jobs]
    for job in jobs:
        place = f"{job.name}: {job.tier.machine} in {job.gcp.region}, {job.tier.strategy}"
        wait = job.tier.spec.get("scheduling", {}).get("maxWaitDuration")
        lines.append(f"{place}{f', waits for machines for {wait} at most (--max_wait)' if wait else ''}")
    for job in jobs:
        lines += job.about or [f"runs in {job.spec['workerPoolSpecs'][0]['containerSpec']['imageUri']}"]
    for job in jobs:
        ships = (package.about for package in job.packages if package.about)
        names = ", ".join(package.name for package in job.packages)
        lines += [*ships, f"{names}, in {job.gcp.bucket}/packages"] if job.packages else []
    lines += [f"writes to {job.output}" for job in jobs]
    lines += [f"{job.tier.name}: {price_and_limit(job.tier)}" for job in jobs]
    limits = [job.tier.most_usd for job in jobs]
    if len(jobs) > 1 and None not in limits:
        lines.append(
            f"{len(jobs)} jobs, of which the next is sent only if the one before got no machines, and so cost nothing: "
            f"{max(filter(None, limits)):.2f} USD at most together, unless one loses its machines while it runs"
        )
    lines += cost_lines(jobs)
    lines += [f"warning: {line}" for job in jobs for line in job.warnings]
    return list(dict.fromkeys(lines))


def _as_document(job: Job, label: str) -> dict[str, Any]:
    """Returns the request of a job as a JSON document shows it."""
    request = job.request(label)
    place = {"tier": job.tier.name, "project": job.gcp.project, "region": job.gcp.region, "output": job.output}
    return {**place, "display_name": request.display_name, "labels": request.labels, "spec": request.spec,
            "usd_per_hour": job.tier.price_per_hour, "most_usd": job.tier.most_usd}  # fmt: skip
