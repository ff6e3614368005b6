"""Submits jobs: checks the command, says what it means, creates the job, and goes on where there are no machines."""

import argparse
import dataclasses
import math
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TextIO

from deploy.client.arguments import VerbParser, command_line, parse_program, parser
from deploy.client.call_arguments import FlagValue, as_arguments
from deploy.client.documents import add_json_flag, write_document
from deploy.client.job_flags import add_job_flags, add_plan_flags, package_command, read_changes, read_options
from deploy.client.job_handle import VertexJob
from deploy.client.month_budget import add_budget_flags, check_budget_flags, checked_limit, hold_to_budget
from deploy.localrun.processes import on_signals
from deploy.planning.cost_rule import cost_question
from deploy.planning.interval import Interval
from deploy.planning.kept_plans import FIT, cheapest_lever, cost_lines, memory_lines, plan_of, with_limits
from deploy.tiers.availability import NoMachines
from deploy.tiers.gcp_config import needed_project, read_gcp_config, regions_in
from deploy.tiers.images import installs
from deploy.tiers.job_request import CHECK_S, JobOptions, JobRequest
from deploy.tiers.job_spec import Program, RenderedJob, render, request_on
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
from trainer.base.run_files.run_layout import GPU_CHECK

FLEX_START_SLACK_S = 600.0  # for the service to end a wait by itself
WHAT, WHERE, COST, ALONG = "What runs", "Where", "What it costs", "What goes along"


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


def submit_flags() -> VerbParser:
    """Returns the parser of `submit`."""
    cli = parser(
        "submit",
        "Submits a job to Vertex AI and follows it to its end.",
        "TIER … --recipe=NAME --data=gs://… --bucket=gs://… [any trainer flag]",
    )
    add_job_flags(cli)
    add_plan_flags(cli)
    cli.add_boolean("fit", FIT)
    cli.add_boolean("dry_run", "print what would run and what it may cost, and the request, and stop")
    cli.add_boolean("check", "check the tier's GPUs (trainer.check --on_gpus) instead of training: some minutes")
    cli.add_boolean("detach", "do not follow the job once it is submitted")
    cli.add_argument("--register", default="", metavar="NAME", help="make the model a version of NAME in the Model "
                     "Registry when the job has ended well (docs/serving.md)")  # fmt: skip
    add_budget_flags(cli)
    add_json_flag(cli)
    return cli


@dataclasses.dataclass(frozen=True)
class PreparedSubmission:
    """Holds a submission that was checked: a job for each tier in each region, in the order in which they are tried.

    `about`: pairs of a heading and a line; `register`: the name of a model, and the image that serves it; `plan`:
    makes a line on time and cost, and the USD, where no plan is kept.
    """

    args: argparse.Namespace
    options: JobOptions
    jobs: Sequence[RenderedJob]
    record: Submission
    session: Session
    about: Sequence[tuple[str, str]]
    register: tuple[str, str] = ("", "")
    plan: Callable[[], tuple[str, Interval | None]] | None = None

    def run(self, verb: str) -> int:
        """Submits and follows the job as a verb does, or shows the request with --dry_run; returns the exit code."""
        args = self.args
        if args.dry_run:
            self._show(verb)
            return DONE
        say(*(f"# {line}" for _, line in self.about))
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

    def _show(self, verb: str) -> None:
        """Prints the lines about the jobs, by heading, the requests, and shell commands that send the first."""
        line, usd = self.plan() if self.plan else ("", None)
        costs = cost_question([(job, 1) for job in self.jobs], self.args.max_cost, alternatives=True, plan=usd).lines()
        about = [*self.about, *((COST, line) for line in (line, *costs) if line)]
        for heading in (WHAT, WHERE, COST, ALONG):
            if lines := dict.fromkeys(f"# {line}" for place, line in about if place == heading):
                say(f"## {heading}", *lines)
        job, label = self.jobs[0], attempt_label(self.record.submission)
        command = Gcloud(job.gcp.project, job.gcp.region).shell_command(custom_job(job, label))
        say("\n## The request", *filter(None, [package_command(job, self.args), command]))
        requests = [_as_document(job, label) for job in self.jobs]
        write_document(self.args, verb, requests=requests, about=[line for _, line in about])

    def send(self) -> SubmittedJob:
        """Creates the job, or finds the one that an interrupted call with the same arguments created.

        Raises UserError if it may cost much, without --max_cost, and nobody agrees.
        """
        args, jobs, session = self.args, self.jobs, self.session
        with api_errors(jobs[0].gcp):
            if earlier := self._interrupted():
                return self._resumed(earlier)
            hold_to_budget(jobs, args, session)
            line, usd = self.plan() if self.plan else ("", None)
            say(*([f"# {line}"] if line else []))
            cost_question([(job, 1) for job in jobs], args.max_cost, alternatives=True, plan=usd).agree()
            for job in jobs:
                check_resources(job)
            packages = {package.uri(job.gcp.bucket): package for job in jobs for package in job.packages}
            upload_packages(list(packages.values()), jobs[0].gcp.bucket)
            submitted = self._submitted(self.record, jobs)
            submitted.create()
            return submitted

    def _submitted(self, record: Submission, jobs: Sequence[RenderedJob]) -> SubmittedJob:
        return SubmittedJob(record, jobs, self.args.backend, self.session, self.args.max_wait, self.register)

    def _interrupted(self) -> Submission | None:
        """Returns the submission of the same command whose job was not followed to its end; None if there is none."""
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
        return earlier

    def _resumed(self, earlier: Submission) -> SubmittedJob:
        """Returns the last job of an earlier call, which goes on with the tiers and regions after that job's own."""
        attempt, options = earlier.attempts[-1], dataclasses.replace(self.options, submission=earlier.submission)
        places = [(job.tier.name, job.gcp.region) for job in self.jobs]
        place = (attempt.tier, attempt.region)
        left = self.jobs[places.index(place) :] if place in places else self.jobs[:1]
        submitted = self._submitted(
            earlier, [render(job.request, job.gcp, with_limits(job.request, options)) for job in left]
        )
        submitted.resume(attempt.job)
        return submitted


def prepare(arguments: Sequence[str], session: Session) -> PreparedSubmission:
    """Returns what `submit` was asked for, checked. Raises UserError for what could be known to fail."""
    args, program = parse_program(submit_flags(), arguments)
    check_budget_flags(args)
    register = _registration(args, program) if args.register else ("", "")
    if args.check and not program.values.keys() & {"recipe", "model"}:
        program = program.replace(recipe="wgan_gp_digits")  # a small one, whose data are in the package
    options = read_options(args, program)
    if args.check:
        options = dataclasses.replace(options, subject=f"check-{options.subject}", check=True)
    jobs = _candidates(args, program, options)
    if args.month_budget:
        checked_limit(jobs, args.month_budget)
    sources = list(dict.fromkeys(package.uri(job.gcp.bucket) for job in jobs for package in job.packages))
    record = Submission(options.submission, command=command_line("submit", arguments), sources=sources)
    runs = [] if args.check else [job.request for job in jobs]
    about = [*describe(jobs), *((COST, line) for line in (*cost_lines(jobs), *_in_turn(jobs))),
             *((WHAT, line) for line in memory_lines(runs, plan=args.plan, force=args.force))]  # fmt: skip
    if args.dry_run:
        budget = ", the month's budget" if args.month_budget else ""
        about.append((WHERE, f"not checked here: login, bucket, data, quota{budget}"))
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
    with printed_on(stream):
        return prepare(as_arguments(tiers, named, settings), session).send()


def _registration(args: argparse.Namespace, program: Program) -> tuple[str, str]:
    """Returns the name of the model of this job, and its image. Raises UserError if it could not be registered."""
    if args.detach or args.check or isinstance(program, Script):
        raise UserError("--register needs a training that is followed to its end: drop --detach, --check or --script")
    return checked_name(args.register), serving_image("" if installs(args.image) else args.image)


def _candidates(args: argparse.Namespace, program: Program, options: JobOptions) -> list[RenderedJob]:
    """Returns a checked job for every tier in every region, in the order in which they are tried."""
    tiers = read_tiers_or_machine(args.tiers, args.machine_type, args.accelerator, args.prices, read_changes(args))
    regions = regions_in(args.region)
    if args.detach and len(tiers) * len(regions) > 1:
        raise UserError("--detach is for one tier in one region: whether it has machines is known only later")
    jobs, left_out = list[RenderedJob](), list[tuple[str, NoMachines]]()
    for tier in tiers:
        # Mistakes in the command come before those of the account.
        request = request_on(one_machine(tier, CHECK_S) if args.check else tier, _fitting(args, tier, program))
        _check_named(request)
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
    check_detached(args, jobs[0].tier)
    return jobs


def check_detached(args: argparse.Namespace, tier: Tier) -> None:
    """Raises UserError if nobody would cancel a job of the tier that waits for machines longer than --max_wait."""
    if args.detach and args.max_wait and tier.strategy != "FLEX_START":
        raise UserError("--detach contradicts --max_wait: nobody would cancel the job then: drop one of them")


def _fitting(args: argparse.Namespace, tier: Tier, program: Program) -> Program:
    """Returns what runs on a tier, with the setting that --fit adds to a training."""
    if not args.fit or args.check or isinstance(program, Script):
        return program
    config = program.resolve()
    lever = cheapest_lever(tier, plan_of(config, program), config)
    return program.replace(**{lever.name: lever.value}) if lever else program


def _check_named(request: JobRequest) -> None:
    """Raises UserError if nobody named what is trained: the default, a GAN on digits, is for trying things out."""
    training = request.training
    task = request.tier.spec["workerPoolSpecs"][0]
    arguments = (task.get("pythonPackageSpec") or task.get("containerSpec") or {}).get("args", [])
    in_file = {argument.partition("=")[0].removeprefix("--") for argument in arguments}
    if training and not {"recipe", "model"} & {*training.overrides.values, *in_file}:
        raise UserError("recipe is missing: a job is paid for: name what it trains, by --recipe= or --model=")


def describe(jobs: Iterable[RenderedJob]) -> Iterator[tuple[str, str]]:
    """Yields (heading, line): what is submitted, where, what goes along, what it costs, what happens when it fails."""
    for job in jobs:
        tier, scheduling = job.tier, job.tier.spec.get("scheduling", {})
        yield WHAT, f"{job.name}: {tier.machine} in {job.gcp.region}, {tier.strategy}"
        check = f"trains nothing: checks the accelerators of one machine ({GPU_CHECK}, docs/gpus.md)"
        yield WHAT, check if job.options.check else job.request.about
        yield WHERE, f"writes to {job.output}"
        if tier.strategy == "FLEX_START":
            yield WHERE, f"waits for machines for {scheduling['maxWaitDuration']} at most (--max_wait)"
        yield from ((ALONG, package.about) for package in job.packages if package.about)
        if job.packages:
            yield ALONG, f"{', '.join(package.name for package in job.packages)}, in {job.gcp.bucket}/packages"
        yield from ((WHERE, line) for line in job.about)
        yield COST, price_and_limit(tier)
        if scheduling.get("disableRetries"):
            yield WHERE, "a worker that exits non-zero is not restarted (disableRetries)"
        else:
            scope = "with all other workers" if scheduling.get("restartJobOnWorkerRestart") else "in place"
            yield WHERE, f"a worker that exits non-zero is restarted {scope}, up to 5 times, then the job up to 3 times"
        yield from ((WHAT, f"warning: {line}") for line in job.warnings)


def _in_turn(jobs: Sequence[RenderedJob]) -> Iterator[str]:
    """Yields what several jobs may cost, of which the next is sent where there were no machines for the one before."""
    limits = [job.tier.most_usd for job in jobs]
    if len(jobs) > 1 and None not in limits:
        yield (
            f"{len(jobs)} jobs, of which the next is sent only if the one before got no machines, and so cost nothing: "
            f"{max(usd or 0.0 for usd in limits):.2f} USD at most together, unless one loses its machines while it runs"
        )


def _as_document(job: RenderedJob, label: str) -> dict[str, Any]:
    """Returns the request of a job as a JSON document shows it."""
    request = custom_job(job, label)
    place = {"tier": job.tier.name, "project": job.gcp.project, "region": job.gcp.region, "output": job.output}
    return {**place, "display_name": request.display_name, "labels": request.labels, "spec": request.spec,
            "usd_per_hour": job.tier.price_per_hour, "most_usd": job.tier.most_usd}  # fmt: skip
