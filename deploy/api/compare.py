"""Compares tiers: runs the same work on each, and reads what came out."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from deploy.api.request import USUAL, Value, VerbRequest, call_verb, verb_usage
from deploy.api.submit import NOTHING_SENT, new_submission, packages_of
from deploy.base.console import printed_on, say
from deploy.comparison.directory import any_begun
from deploy.comparison.execution import ComparisonRequest, Runner, announce, run_comparison
from deploy.comparison.runners import LocalRunner, VertexRunner
from deploy.comparison.tracked_runs import track_runs, trackers_in
from deploy.job.options import CodeOptions, JobOptions
from deploy.job.script import Script
from deploy.job.spec import machine_spec
from deploy.report.formatting import figures, html_table
from deploy.report.html_page import write_report
from deploy.report.measures import FIGURES, figures_of
from deploy.tiers.tier import read_tiers
from trainer.base.errors import DONE, UserError
from trainer.base.settings.fields import fields_of, options_class, setting
from trainer.base.storage import local_path

# options of jobs that also apply to runs on this machine
_LOCAL_OPTIONS = (*fields_of(CodeOptions), "prices")


@dataclass(frozen=True)
class Comparison:
    """Holds what a comparison found: its folder, its exit code, and the content of table.json.

    `tiers`: the numbers of each tier, by the keys of table.json; `verdict` and `notes`: sentences.
    """

    folder: Path
    exit_code: int
    tiers: Sequence[Mapping[str, Any]]
    verdict: Sequence[str]
    notes: Sequence[str]

    def __repr__(self) -> str:
        return (
            f"<comparison of {len(self.tiers)} tiers in {self.folder}:"
            f" {' '.join(self.verdict[:1])}>"
        )

    def _repr_html_(self) -> str:
        values = {str(tier["tier"]): figures_of(tier) for tier in self.tiers}
        lines = []
        for name, of_tier in values.items():
            cells = [figures(of_tier[key]) if key in of_tier else "" for key in FIGURES]
            lines.append([name, *cells])
        return html_table(("tier", *FIGURES), lines, self.verdict)


def read_comparison(folder: Path, code: int) -> Comparison:
    """Returns the comparison in `folder`, with no tiers if no run has begun."""
    file = folder / "table.json"
    content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    fields = [content.get(name, []) for name in ("tiers", "verdict", "notes")]
    return Comparison(folder, code, *fields)


@options_class
class CompareOptions(JobOptions):
    """Holds the options of `compare`; its jobs are not restarted when they fail."""

    tiers: tuple[str, ...] = setting(
        meaning="bare names of job_configs/, as l4x4, or your own files",
        metavar="TIER",
        positional=True,
    )
    out: str = setting("runs/comparison", "folder of the comparison", "FOLDER")
    scaling: str = setting(
        "strong",
        "strong: the same global batch on every tier (default); weak: the same batch per replica",
        "strong|weak",
        choices=("strong", "weak"),
    )
    repeats: int = setting(1, "runs of each tier", "COUNT", minimum=1, maximum=100)
    parallel: int | None = setting(
        None,
        "runs at a time (default: 1; on Vertex AI all at once)",
        "COUNT",
        minimum=1,
        maximum=100,
    )
    on: str = setting(
        "local",
        "processes of this machine (default), or jobs of Vertex AI, without restarts; the flags of"
        " `submit` say where",
        "local|vertex",
        choices=("local", "vertex"),
    )
    baseline: str = setting("", "base of the speed-ups (default: the first)", "TIER")
    price_per_hour: Mapping[str, float] = setting(
        {}, "the price of all machines of a tier", "TIER=USD", repeated=True, above=0
    )
    disable_retries: bool = True


DESCRIPTION = """\
Trains one recipe on several tiers, the same work on each, and reports what came out.

The state of a comparison is in its folder: comparison.json holds the request, TIER/repeat-N the job
directory of each run, or a copy of the files that a report needs. The same command again repeats no
finished run and resumes failed or interrupted ones. On Vertex AI an interrupted comparison leaves
its jobs running and finds them again.
"""
USAGE = verb_usage(
    "compare",
    "TIER … --recipe=NAME [--scaling=weak] [--repeats=3] [any trainer flag]",
    DESCRIPTION,
    USUAL,
)


def compare(
    *tiers: str,
    recipe: str | None = None,
    settings: Mapping[str, Value] | None = None,
    stream: TextIO | None = None,
    **options: Value,
) -> Comparison:
    """Runs the same work on each tier, here or with on="vertex" as jobs, and returns the results.

    `settings`: the trainer's; `options`: fields of CompareOptions, such as out, repeats or bucket.
        The same call again repeats no finished run. Raises UserError as the command does, but not
        for a run that failed: see `exit_code`.
    """
    with printed_on(stream):
        keywords = {"recipe": recipe, **options}
        return compare_by_options(call_verb(CompareOptions, tiers, keywords, settings, USAGE))


def compare_by_options(
    request: VerbRequest[CompareOptions], *, dry_run: bool = False
) -> Comparison:
    """Runs the requested comparison and returns its results; a dry run only prints its cost."""
    options = request.options
    program = request.program
    trackers = trackers_in(program.values)
    # all runs are sent from here at the end, under one parent run
    program = program.without("track")
    # The tiers, and what runs on each.
    specs = read_tiers(
        options.tiers, options.prices, options.price_per_hour, partial(machine_spec, options)
    )
    names = [tier.name for tier in specs]
    if options.baseline and options.baseline not in names:
        raise UserError(f"baseline={options.baseline}: it must be one of {', '.join(names)}")
    comparison = ComparisonRequest(
        # a script's batch is not known
        specs,
        program,
        "script" if isinstance(program, Script) else options.scaling,
        options.repeats,
        request.command,
    )
    out = local_path(options.out, "out")
    vertex = options.on == "vertex"
    # Options of jobs are refused where this machine runs the tiers.
    defaults = JobOptions()
    job_only = [name for name in fields_of(JobOptions) if name not in _LOCAL_OPTIONS]
    job_flags = [name for name in job_only if getattr(options, name) != getattr(defaults, name)]
    job_flags += ["dry_run"] * dry_run
    if job_flags and not vertex:
        raise UserError(
            f"--{job_flags[0]} is for jobs of Vertex AI: add --on=vertex, or leave it out"
        )
    runs = comparison.resolve()
    runner: Runner = LocalRunner()
    if vertex:
        runner = VertexRunner(
            options, packages_of(options, program), new_submission(), dry_run=dry_run
        )
    if dry_run:
        missing = announce(comparison, runs, out, runner)
        say(NOTHING_SENT if missing else f"nothing to submit: all runs in {out} are done")
        return Comparison(out, DONE, [], [], [])
    code = run_comparison(
        comparison, runs, out, runner, options.parallel or (len(comparison.runs()) if vertex else 1)
    )
    # The report, and what the trackers get.
    if any_begun(out):
        write_report([options.out], options.out, options.baseline, dict(options.price_per_hour))
        track_runs([options.out], trackers)
    return read_comparison(out, code)
