"""Plans a run on tiers before anything is paid: whether it fits, how long it takes, what it costs,
with intervals.

`plan_by_options` forecasts each tier; a Plan formats the forecasts and answers the user's questions
from them.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from deploy.api.request import Value, VerbRequest, call_verb, verb_usage
from deploy.api.submit import USAGE as SUBMIT
from deploy.api.submit import SubmitOptions, prepare_submission
from deploy.base.console import printed_on, say, tell
from deploy.job.options import JobOptions
from deploy.job.workload import tracker_packages
from deploy.packaging.distributions import requirements
from deploy.packaging.image_choice import AUTO, choose_image, remembered
from deploy.packaging.packages import packages_with
from deploy.planning.cached_plans import FIT, best_memory_option, plan_of
from deploy.planning.extrapolation import Extrapolation, extrapolate
from deploy.planning.forecast import (
    BY_CPU,
    BY_GRAPH,
    BY_RUNS,
    PREEMPTIONS_PER_HOUR,
    RESTART_SECONDS,
    Forecast,
    PricedEstimate,
    forecast,
)
from deploy.planning.recommendations import Answer, Choice, answers, likely, time_of
from deploy.planning.step_time import CONSTANTS, CPU_DOUBT, Interval, is_compiled
from deploy.planning.tier_memory import FRAGMENTS, NEAR
from deploy.platform import buckets
from deploy.platform.automatic_image import automatic_image
from deploy.report.collection import collect
from deploy.report.formatting import (
    dollars,
    grouped,
    html_table,
    markdown_table,
    money,
    terminal_table,
)
from deploy.tiers.gcp_config import (
    GcpConfig,
    checked_address,
    needed_project,
    needed_region,
)
from deploy.tiers.machine_table import load_machines
from deploy.tiers.tier import STRATEGIES, load_tier, read_tiers, tier_names
from trainer.base.errors import UserError
from trainer.base.run_files.job_files import RESULT
from trainer.base.run_files.plan_file import StepPlan, plan_key, read_plan
from trainer.base.settings.fields import Seconds, options_class, setting, setting_of
from trainer.base.settings.request import Overrides
from trainer.base.settings.train_config import TrainConfig
from trainer.base.storage import expanded, make_writable

WIDTH = 100
LINES = 15
TITLES = (
    "tier",
    "strategy",
    "fits",
    "GiB of a device",
    "largest batch",
    "ms/step",
    "hours",
    "USD",
    "efficient",
)
_TEXT_COLUMNS = 3  # the first of the columns, which hold text; the others hold numbers


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Returns the indices of the points that no other dominates, sorted by their first value.

    A point dominates another if none of its two values is higher and one is lower. Of equal points
    the first is returned.
    """
    front: list[int] = []
    for index in sorted(range(len(points)), key=lambda index: points[index]):
        if not front or points[index][1] < points[front[-1]][1]:
            front.append(index)
    return front


class OfferChoice(NamedTuple):
    """Holds a tier under a scheduling strategy, with the hours and the USD of the whole job."""

    tier: str
    strategy: str
    hours: Interval
    usd: Interval

    @property
    def flags(self) -> dict[str, Any]:
        """Returns the flags of `submit` that ask for this strategy."""
        return {"spot": self.strategy == "SPOT", "flex_start": self.strategy == "FLEX_START"}


@dataclass(frozen=True)
class Plan:
    """Holds the forecasts of all tiers, each with its offers: the hours and USD under each
    scheduling strategy.

    `forecasts`: one for each tier; `names`: the name that `submit`
    takes, by tier.
    """

    plan: StepPlan
    forecasts: Sequence[Forecast]
    about: str  # what is trained
    assumed: Sequence[str]  # about the runs that times come from
    within_hours: float | None = None  # the user's limits, in hours and in USD
    budget_usd: float | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    here_hours: float | None = None  # on the CPU that made the plan, if that is this machine's
    in_bfloat16: Sequence[Forecast] = ()  # of a run that names no precision

    @cached_property
    def offers(self) -> list[Choice]:
        """Returns every offer with its tier, the cheapest first."""
        return sorted(
            ((forecast, offer) for forecast in self.forecasts for offer in forecast.offers),
            key=lambda pair: (pair[1].usd.middle, pair[1].hours.middle, pair[0].tier),
        )

    @cached_property
    def efficient(self) -> set[int]:
        """Returns the indices of the offers that no other offer beats in both time and money."""
        return {*pareto_front([(offer.hours.middle, offer.usd.middle) for _, offer in self.offers])}

    def best(self, within: str | None = None, budget: float | None = None) -> OfferChoice:
        """Returns the cheapest offer that ends `within` a time, such as "8h", and costs at most
        `budget` USD.

        Prefers offers whose upper ends meet both limits; falls back to those whose middle does.
        Raises UserError if there is none.
        """
        limits = {"within": within, "budget": budget}
        # The limits are parsed and checked as flags are.
        options = call_verb(PlanOptions, (), limits, None, USAGE).options
        hours = (options.within or math.inf) / 3600
        usd = options.budget or math.inf
        for end in ("high", "middle"):
            for tier_forecast, offer in likely(self.offers):  # the cheapest first
                if getattr(offer.hours_until_end, end) <= hours and getattr(offer.usd, end) <= usd:
                    tier = self.names.get(tier_forecast.tier, tier_forecast.tier)
                    return OfferChoice(tier, offer.strategy, offer.hours, offer.usd)
        raise UserError(
            f"no tier ends within={within or 'any time'} for budget={budget}:"
            f" {' '.join(self.sentences())}"
        )

    def cells(self) -> list[list[str]]:
        """Returns a row for each offer, then one for each tier without any."""
        rows = []
        for index, (tier_forecast, offer) in enumerate(self.offers):
            rows.append(_cells(tier_forecast, offer, index in self.efficient))
        without = [tier_forecast for tier_forecast in self.forecasts if not tier_forecast.offers]
        return rows + [_cells(tier_forecast, None, False) for tier_forecast in without]

    def __repr__(self) -> str:
        tiers = f"<plan of {len(self.forecasts)} tiers for {self.about}"
        if not self.offers:
            return f"{tiers}: none fits>"
        tier_forecast, offer = self.offers[0]
        return (
            f"{tiers}: {tier_forecast.tier} is the cheapest, {offer.usd.middle:.2f} USD in"
            f" {offer.hours.middle:.3g} h>"
        )

    def _repr_html_(self) -> str:
        return html_table(TITLES, self.cells(), [*self.sentences()])

    def __str__(self) -> str:
        """Returns the answers, and the offers that no other beats in both time and money, on LINES
        lines of WIDTH."""
        return self.brief()

    def brief(self, folder: str = "") -> str:
        """Returns the same; with a `folder`, the last line says that the whole plan is there."""
        answers = self.answers()
        width = max((len(answer.question) for answer in answers), default=0)
        lines = [
            self.about,
            "",
            *(f"  {answer.question.ljust(width)}   {answer.text}" for answer in answers),
            "",
        ]
        # The offers that no other beats, as far as there are lines for them.
        front = [self.offers[index] for index in sorted(self.efficient)]
        rows = []
        for tier_forecast, offer in front[: LINES - len(lines) - 2]:
            fit = tier_forecast.fit
            row = (
                tier_forecast.tier,
                STRATEGIES[offer.strategy],
                fit.verdict if fit else "not known",
                f"{fit.largest_batch:,}" if fit else "",
                time_of(offer),
                offer.usd.text(dollars),
            )
            rows.append(row)
        if rows:
            table = terminal_table(
                ("tier", "how", "fits", "largest batch", "time", "USD"), rows, _TEXT_COLUMNS
            )
            lines += [f"  {line}" for line in table.splitlines()]
        # Where the rest is.
        omitted = len(self.cells()) - len(rows)
        hint = f"{omitted} more: --all; what is assumed" if omitted else "What is assumed"
        prices = load_machines()
        lines.append(
            f"  {hint}{f': {folder}' if folder else ''}. Prices: {prices.region}, {prices.date}"
        )
        return "\n".join(line if len(line) <= WIDTH else f"{line[: WIDTH - 1]}…" for line in lines)

    def table(self) -> str:
        """Returns a table of every offer and of the tiers without any, with answers and notes."""
        return "\n".join(
            [
                self.about,
                "",
                terminal_table(TITLES, self.cells(), _TEXT_COLUMNS),
                *self.sentences(),
                "",
                *self.notes(),
            ]
        )

    def to_markdown(self) -> str:
        """Returns what `table` does, as Markdown."""
        table = markdown_table(
            TITLES, self.cells(), [*self.sentences(), *self.notes()], _TEXT_COLUMNS
        )
        return f"{self.about}\n\n{table}"

    def to_json(self) -> str:
        """Returns the forecasts of all tiers, with all answers and notes, as JSON."""
        content: dict[str, Any] = {
            "about": self.about,
            "sentences": [*self.sentences()],
            "notes": [*self.notes()],
            "tiers": [dataclasses.asdict(forecast) for forecast in self.forecasts],
        }
        return json.dumps(content, indent=2) + "\n"

    def answers(self) -> list[Answer]:
        """Returns the first answers: does it fit, which tier is the cheapest, which the fastest."""
        limits = self.within_hours, self.budget_usd
        half = [(forecast, offer) for forecast in self.in_bfloat16 for offer in forecast.offers]
        return [*answers(self.forecasts, self.offers, *limits, self.here_hours, half)]

    def sentences(self) -> list[str]:
        """Returns the same, each as one line, QUESTION: ANSWER."""
        return [f"{answer.question}: {' '.join(answer.text.split())}" for answer in self.answers()]

    def notes(self) -> Iterator[str]:
        """Yields notes on how the numbers were made, what they assume, and why some are missing."""
        table = load_machines()
        memory = self.plan.memory
        bases = {forecast.basis for forecast in self.forecasts}
        yield (
            "Memory: measured on this machine's CPU with"
            f" {', '.join(map(str, memory.measured_rows))} rows. The upper end allows for another"
            f" order of operations ({memory.worst_order:.2f} x as much) and for fragmentation"
            f" ({FRAGMENTS:g} x that); {NEAR}: the available memory is in this range."
        )
        if any(forecast.kind in table.accelerators for forecast in self.forecasts):
            yield (
                f"A GPU also needs {CONSTANTS.context_gib:g} GiB for CUDA and, where there is room,"
                f" up to {CONSTANTS.convolutions_gib[1]:g} GiB to try algorithms of convolutions"
                " (measured on an H100; jobs limit it to 1 GiB on cards below 32 GB, and to 0.5 GiB"
                f" below 12 GB). Assumed, not measured: {CONSTANTS.workspace_gib:g} GiB of"
                f" workspaces and {CONSTANTS.nccl_gib:g} GiB for NCCL."
            )
        if BY_GRAPH in bases and self.offers:
            yield (
                f"Times from the graph alone: {CONSTANTS.source}; their intervals are the errors on"
                " networks that were left out of the fit. Other cards: scaled by the rates of"
                f" their data sheets, with intervals {CONSTANTS.elsewhere:g} times wider at each"
                " end. --measure=TIER or --from=DIR narrows them."
            )
        if BY_CPU in bases:
            yield (
                f"Times on CPUs: from plain steps on the {self.plan.cpu.cores} virtual CPUs where"
                " the plan was made. More CPUs may gain nothing, or in proportion; another"
                f" processor may take {CPU_DOUBT.low:g} to {CPU_DOUBT.high:g} times as long."
            )
        if BY_RUNS in bases:
            yield from self.assumed
        yield (
            f"Prices are estimates of {table.date} for {table.region} unless set by --prices or"
            " --price_per_hour; they include Vertex AI's fee, which is inferred for spot. The time"
            " to get machines is not included, nor are saving and evaluation where no run shows"
            " them."
        )
        if any(forecast.install_seconds.middle for forecast in self.forecasts):
            yield (
                "Hours and USD include the minutes in which each job installs TensorFlow first (a"
                " guess); an image of your own (python -m deploy image) saves them."
            )
        yield (
            f"Spot: {PREEMPTIONS_PER_HOUR:g} preemptions an hour, a guess, each of which loses half"
            f" of the time between checkpoints, and {RESTART_SECONDS / 60:.0f} minutes; up to twice"
            " as many."
        )
        pairs = [(problem, item.tier) for item in self.forecasts for problem in item.problems]
        yield from (f"{names}: {problem}" for problem, names in grouped(pairs).items())


def _cells(forecast: Forecast, offer: PricedEstimate | None, efficient: bool) -> list[str]:
    fit = forecast.fit
    return [
        forecast.tier,
        STRATEGIES[offer.strategy] if offer else "",
        fit.verdict if fit else "not known",
        fit.gib if fit else "",
        f"{fit.largest_batch:,}" if fit else "",
        forecast.step.times(1e3).text() if forecast.step else "",
        offer.hours.text() if offer else "",
        offer.usd.text(money) if offer else "",
        "*" if efficient else "",
    ]


@options_class
class PlanOptions:
    """Holds the options of `plan`."""

    tiers: tuple[str, ...] = setting(
        (),
        "bare names of job_configs/, as l4x4, or your own files (default: all of job_configs/)",
        "TIER",
        positional=True,
    )
    from_: tuple[str, ...] = setting(
        (),
        "job directory of a run, or a comparison, local or gs://: times come from it",
        "DIR",
        repeated=True,
    )
    measure: str = setting(
        "",
        "first run some steps there, as a job for at most --max_cost, and plan from them; "
        "what was measured before is not paid for again",
        "TIER",
    )
    plan: str = setting("", "a plan of `python -m trainer.plan --out=FILE`", "FILE")
    within: Seconds | None = setting(None, "name the cheapest that ends in time, as 8h or 2d")
    budget: float | None = setting(
        None,
        "name the fastest within this cost",
        "USD",
        unit="USD",
        above=0,
        maximum=999_999,
    )
    fit: bool = setting(False, FIT)
    prices: str = setting("", "YAML of your own prices, in USD an hour", "FILE")
    price_per_hour: Mapping[str, float] = setting(
        {}, "the price of all machines of a tier", "TIER=USD", repeated=True, above=0
    )
    package: str = setting_of(JobOptions, "package")
    # For the job that --measure sends:
    max_cost: float | None = setting_of(JobOptions, "max_cost")
    project: str = setting_of(JobOptions, "project")
    region: str = setting_of(JobOptions, "region")
    bucket: str = setting_of(JobOptions, "bucket")
    image: str = setting_of(JobOptions, "image")
    backend: str = setting_of(JobOptions, "backend")


DESCRIPTION = """\
Says before anything is paid whether a run fits each tier, how long it takes and what it costs.

Memory and work of a step come from real steps on this machine's CPU, in a process of its own; the
plan is kept, and made again only if the settings, your sources or the versions change. Times come
from the step's graph; with runs at hand (--from) from these, which is much narrower. No machine is
started, but for --measure.
"""
USAGE = verb_usage("plan", "[TIER …] --recipe=NAME [--from=DIR] [any trainer flag]", DESCRIPTION)


def plan(
    *tiers: str,
    recipe: str | None = None,
    settings: Mapping[str, Value] | None = None,
    stream: TextIO | None = None,
    **options: Value,
) -> Plan:
    """Returns the plan of a run on these tiers, by default on all.

    `settings`: the trainer's; `options`: fields of PlanOptions. The first plan of new settings
        measures steps on this machine's CPU, which takes a minute. Writes no file of its own.
        Raises UserError as the command does.
    """
    with printed_on(stream):
        keywords = {"recipe": recipe, **options}
        return plan_by_options(call_verb(PlanOptions, tiers, keywords, settings, USAGE))


def plan_by_options(
    request: VerbRequest[PlanOptions],
    out: Path | None = None,
    *,
    dry_run: bool = False,
) -> Plan:
    """Returns the plan that the options describe. Raises UserError as the command does.

    `out`: a folder that must be writable before anything is measured; `dry_run`: prints the job of
        --measure instead of sending it, and plans without it.
    """
    options = request.options
    overrides = request.program
    assert isinstance(overrides, Overrides)
    if options.measure and options.max_cost is None:
        raise UserError(
            f"measure={options.measure}: a job costs money: set a limit, such as --max_cost=1"
        )
    # Mistakes are refused before the slow measurement on this machine.
    if options.measure:
        load_tier(options.measure)
        checked_address("bucket", options.bucket)
    elif options.max_cost is not None or options.bucket or dry_run:
        raise UserError(
            "--max_cost, --bucket and --dry_run are for the job of --measure=TIER: add it, or drop"
            " them"
        )
    names = options.tiers or tier_names()
    sources = options.from_
    usd_by_tier = options.price_per_hour
    specs = read_tiers(names, options.prices, usd_by_tier)
    config = overrides.config
    if out:
        make_writable(out, "out")
    step_plan = read_plan(expanded(options.plan)) if options.plan else plan_of(config, overrides)
    if options.plan and step_plan.key != plan_key(config, step_plan.versions):
        raise UserError(
            f"plan={options.plan}: it was made for other settings or sources ({step_plan.model} on"
            f" {step_plan.data}): leave it out, or make it again with the flags of this command:"
            " python -m trainer.plan … --out=FILE"
        )
    if options.measure and (folder := _measured(request, step_plan, config, dry_run)):
        sources = (*sources, folder)
    extrapolations = list[Extrapolation]()
    assumed = list[str]()
    if sources:
        facts = [tier.facts for tier in specs]
        extrapolations, assumed = extrapolate(collect(sources), facts, config)
    by_name = {extrapolation.tier: extrapolation for extrapolation in extrapolations}
    # An image for tiers with GPUs and one for others: in a plain one each start of a job installs
    # what it requires.
    built = None if options.image else remembered()
    code = packages_with(options.package) if built or options.image == AUTO else []
    images = {False: options.image, True: options.image}
    if options.image == AUTO:
        gcp = GcpConfig(needed_project(options.project), needed_region(options.region), "")
        for gpus in {tier.accelerators > 0 for tier in specs}:
            needed = [*requirements(gpus), *tracker_packages(config.track)]
            needed += [line for package in code for line in package.requires]
            images[gpus], lines = automatic_image(gcp, needed)
            say(*lines)
    # A forecast of each tier; also in bfloat16, which the user may not have thought of.
    forecasts: list[Forecast] = []
    in_bfloat16: list[Forecast] = []
    default_precision = config.precision == "float32" and "precision" not in overrides.values
    for tier in specs:
        extrapolation = by_name.get(tier.name)
        if options.fit and extrapolation:
            tell(f"# {tier.name}: --fit is ignored: a run of --from shows this tier as it is")
        run = config
        if options.fit and not extrapolation:
            chosen = best_memory_option(tier, step_plan, config)
            run = replace(config, **{chosen.name: chosen.value}) if chosen else config
        plain = choose_image(tier, images[tier.accelerators > 0], built, code).installs
        forecasts.append(forecast(tier, step_plan, run, extrapolation, plain=plain))
        if default_precision and not sources:
            half = replace(run, precision="mixed_bfloat16")
            in_bfloat16.append(forecast(tier, step_plan, half, plain=plain))
    as_typed = {tier.name: name for tier, name in zip(specs, names, strict=True)}
    # What is trained, in words. Whether XLA compiles it may differ from tier to tier, and is known
    # of times from the graph alone.
    compiled = {forecast.compiled for forecast in forecasts if forecast.basis == BY_GRAPH}
    xla = ""
    if len(compiled) > 1:
        xla = ", compiled on one GPU"
    elif compiled:
        xla = ", compiled" if True in compiled else ", plain"
    about = (
        f"{config.recipe or config.model} on {config.data or 'its data'}:"
        f" {step_plan.total_steps(config):,} steps, global batch {config.global_batch_size},"
        f" {config.precision}{xla}"
    )
    # The time on this machine, if it made the plan.
    here_hours = None
    if not (options.plan or config.precision.startswith("mixed")):
        micro_batches = config.micro_batches_on(1)
        rows = config.global_batch_size / micro_batches
        seconds = step_plan.cpu.seconds.at(rows) * micro_batches
        here_hours = seconds * step_plan.total_steps(config) / 3600
    return Plan(
        step_plan,
        forecasts,
        about,
        assumed,
        options.within and options.within / 3600,
        options.budget,
        as_typed,
        here_hours,
        in_bfloat16,
    )


# Steps that a measurement may have: the first number for which the choice of XLA is that for the
# whole run.
_MEASURED = (50, 500, 1000, 2000, 5000, 10_000)


def _measured(
    request: VerbRequest[PlanOptions],
    plan: StepPlan,
    config: TrainConfig,
    dry_run: bool,
) -> str:
    """Runs some steps as a job on the tier of --measure, unless they were run before.

    Returns the folder with the measurements of all tiers; a dry run only prints the job, and
    returns "".
    """
    options = request.options
    overrides = request.program
    assert isinstance(overrides, Overrides)
    tier = load_tier(options.measure)
    total = plan.total_steps(config)
    compiled = is_compiled(plan, config, tier.devices)
    # So few steps that they are cheap, but compiled as those of the whole run are.
    steps = total
    for count in _MEASURED:
        if is_compiled(plan, replace(config, steps=count), tier.devices) == compiled:
            steps = min(total, count)
            break
    # A folder for these settings and sources, in which each tier has a job directory.
    flags = overrides.without("steps", "epochs", "job_dir", "report_every_steps")
    digest = hashlib.sha256(" ".join([plan.key, *flags.arguments()]).encode()).hexdigest()[:12]
    folder = f"{checked_address('bucket', options.bucket)}/measured/{digest}"
    job_dir = f"{folder}/{tier.name}"
    if not dry_run:
        result = json.loads(buckets.read_text(f"{job_dir}/{RESULT}")[0] or "{}")
        if result.get("state") == "done":
            tell(f"{options.measure} was measured before: {job_dir}")
            return folder
    shared = ["max_cost", "project", "region", "bucket", "image", "backend", "package", "prices"]
    job_options = {name: getattr(options, name) for name in shared}
    program = flags.replace(steps=steps, report_every_steps=max(1, steps // 5), job_dir=job_dir)
    submit_options = SubmitOptions(tiers=(options.measure,), **job_options)
    submission = prepare_submission(VerbRequest(submit_options, program, SUBMIT.program))
    if dry_run:
        say(
            *submission.about,
            f"nothing was sent: {steps} steps would be measured; the plan does without them",
        )
        return ""
    submission.finish()
    return folder
