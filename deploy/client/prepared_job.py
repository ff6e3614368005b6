"""Submits jobs: checks the command, says what it means, creates the job, and goes on where there are no machines."""

import argparse
import dataclasses
import math
import shlex
import signal
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TextIO

from deploy.client.arguments import add_flags, command_line, parse_program, parser
from deploy.client.call_arguments import FlagValue, as_arguments
from deploy.client.documents import add_json_flag, write_document
from deploy.client.job_flags import OF_VERTEX, add_plan_flags, read_changes, read_options
from deploy.client.job_handle import VertexJob
from deploy.localrun.processes import on_signals
from deploy.planning.cost_rule import CostQuestion, cost_question
from deploy.planning.kept_plans import FIT, cheapest_lever, cost_lines, memory_lines, plan_of, with_limits
from deploy.tiers.availability import NoMachines
from deploy.tiers.gcp_config import needed_project, read_gcp_config, regions_in
from deploy.tiers.images import installs
from deploy.tiers.job_request import CHECK_S, JobOptions
from deploy.tiers.job_spec import Program, RenderedJob, render, request_on, to_yaml
from deploy.tiers.job_tracking import CREATE, with_tensorboard
from deploy.tiers.output import forget_stdout, printed_on, say
from deploy.tiers.script import Script
from deploy.tiers.tier import Tier, one_machine, read_tiers_or_machine
from deploy.vertex.api import ApiError, JobStatus
from deploy.vertex.creation import look_for
from deploy.vertex.errors import api_errors, exit_code, stocked_out
from deploy.vertex.gcloud import Gcloud
from deploy.vertex.history import Submission, attempt_label, find_interrupted, record_status
from deploy.vertex.logs import PrintLine, show, watch_job
from deploy.vertex.registration import read_registration, register_run, serving_image
from deploy.vertex.registry import checked_name
from deploy.vertex.session import SESSION, Session
from deploy.vertex.spending import price_and_limit
from deploy.vertex.submission import check_resources, custom_job, submit_job, upload_packages
from trainer.base.errors import DONE, INTERRUPTED, UserError
from trainer.base.run_files.records import GPU_CHECK
from trainer.base.settings.fields import Parser
from trainer.base.storage import local_path, make_writable, write_whole

FLEX_START_SLACK_S = 600.0  # for the service to end a wait by itself
# Flags with which a job is not followed: of several, the next could not be tried, and nobody ends a wait for machines.
_UNFOLLOWED = {
    "detach": "whether it has machines is known only later", "spec": "a spec has one job", "out": "a spec has one job",
}  # fmt: skip


class SubmittedJob(VertexJob):
    """Represents the newest job of a submission; where there are no machines for it, `wait` goes on with the next."""

    def __init__(
        self, record: Submission, jobs: Sequence[RenderedJob], backend: str, session: Session,
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
        record_status(self.record, attempt, status, self.session.clock.now())
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
    jobs: Sequence[RenderedJob]
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
        job = dataclasses.replace(job, spec=with_tensorboard(job.spec, job.gcp))
        write_whole(file, to_yaml(job.spec))
        request = custom_job(job, attempt_label(self.record.submission))
        command = Gcloud(job.gcp.project, job.gcp.region).create_command(request, self.args.out)
        say(f"nothing was sent: {self.args.out} has the spec, and this command sends it:", shlex.join(command))
        self._write_requests("submit", [job], self.about)
        return DONE

    def _question(self) -> CostQuestion:
        return cost_question([(job, 1) for job in self.jobs], self.args.max_cost, alternatives=True)

    def _write_requests(self, verb: str, jobs: Sequence[RenderedJob], about: Sequence[str]) -> None:
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

    def _submitted(self, record: Submission, jobs: Sequence[RenderedJob]) -> SubmittedJob:
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
        jobs = [render(job.request, job.gcp, with_limits(job.request, options)) for job in left]
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
    runs = [] if args.check else [job.request for job in jobs]
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


def _candidates(args: argparse.Namespace, program: Program, options: JobOptions) -> list[RenderedJob]:
    """Returns a checked job for every tier in every region, in the order in which they are tried."""
    tiers = read_tiers_or_machine(args.tiers, args.machine_type, args.accelerator, args.prices, read_changes(args))
    regions = regions_in(args.region)
    unfollowed = next((flag for flag in _UNFOLLOWED if getattr(args, flag)), "")
    if unfollowed and len(tiers) * len(regions) > 1:
        raise UserError(f"--{unfollowed} is for one tier in one region: {_UNFOLLOWED[unfollowed]}")
    jobs, left_out = list[RenderedJob](), list[tuple[str, NoMachines]]()
    for tier in tiers:
        # Mistakes in the command come before those of the account.
        fitting = program
        if args.fit and not args.check and not isinstance(program, Script):
            config = program.resolve()
            if lever := cheapest_lever(tier, plan_of(config, program), config):
                fitting = program.replace(**{lever.name: lever.value})
        request = request_on(one_machine(tier, CHECK_S) if args.check else tier, fitting)
        # The default, a GAN on digits, is for trying things out: somebody, or the tier's file, names what is paid for.
        task = request.tier.spec["workerPoolSpecs"][0]
        arguments = (task.get("pythonPackageSpec") or task.get("containerSpec") or {}).get("args", [])
        in_file = {argument.partition("=")[0].removeprefix("--") for argument in arguments}
        if request.training and not {"recipe", "model"} & {*request.training.overrides.values, *in_file}:
            raise UserError("recipe is missing: a job is paid for: name what it trains, by --recipe= or --model=")
        for region in regions:
            gcp = read_gcp_config(argparse.Namespace(**{**vars(args), "region": region}))
            try:
                jobs.append(render(request, gcp, with_limits(request, options)))
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


def describe(jobs: Sequence[RenderedJob]) -> list[str]:
    """Returns what people want to know of jobs: what runs, on what, in which image, where to, what it costs.

    A line that is the same for all stands once.
    """
    check = f"trains nothing: checks the accelerators of one machine ({GPU_CHECK}, docs/gpus.md)"
    lines = [check if job.options.check else job.request.about for job in jobs]
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


def _as_document(job: RenderedJob, label: str) -> dict[str, Any]:
    """Returns the request of a job as a JSON document shows it."""
    request = custom_job(job, label)
    place = {"tier": job.tier.name, "project": job.gcp.project, "region": job.gcp.region, "output": job.output}
    return {**place, "display_name": request.display_name, "labels": request.labels, "spec": request.spec,
            "usd_per_hour": job.tier.price_per_hour, "most_usd": job.tier.most_usd}  # fmt: skip
