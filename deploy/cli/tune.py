"""Tries settings of one recipe and reports the best: `python -m deploy tune TIER --recipe=… --tune=NAME=VALUES`.

Each --tune names a setting, one of your functions' too, and its values: learning_rate=1e-5..1e-3:log, dropout=0..0.5
or width=16,32. On this machine (--on=local) every trial is an ordinary job directory; on Vertex AI the study is one
HyperparameterTuningJob. The same command again goes on: no finished trial is repeated.
"""

import shlex
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from deploy.client.arguments import command_line, parse, parser
from deploy.client.documents import add_json_flag, write_document
from deploy.client.job_flags import add_place_flags, read_changes, read_options, refuse_flags_of_vertex
from deploy.report.tracked_runs import track, trackers_in
from deploy.study.local_study import LocalStudy
from deploy.study.outcome import StudyOutcome
from deploy.study.space import check_space, configurations, read_space
from deploy.study.study_request import GOALS, StudyRequest, check_study_folder, goal_of
from deploy.study.vertex_study import VertexStudy
from deploy.tiers.output import say
from deploy.tiers.tier import load_tier
from deploy.vertex.session import SESSION, Session
from trainer.base.errors import DONE, FAULT, UserError
from trainer.base.settings.flags import Parser, whole
from trainer.base.settings.resolution import Overrides
from trainer.base.storage import local_path


def main(arguments: Sequence[str], session: Session = SESSION) -> int:
    """Runs the study and writes its results; returns 0 if a trial is complete and none is left to resume."""
    args, overrides = parse(_flags(), arguments)
    trackers, overrides = trackers_in(overrides.values), overrides.without("track")
    plan = _plan(args, overrides, command_line("tune", arguments))
    out = local_path(args.out, "out")
    check_space(plan.space, plan.request)
    check_study_folder(out, plan.summary(args.on))
    _announce(plan)
    if args.on == "vertex":
        return _on_vertex(plan, out, args, overrides, session, trackers)
    refuse_flags_of_vertex(args)
    if args.dry_run:
        return _write(args, out, StudyOutcome((), plan).content())
    start = shlex.join(["python", "-m", "trainer.task", *overrides.arguments(), "--job_dir=runs/best"])
    code, trials = LocalStudy(plan, out).run()
    return _report(StudyOutcome(trials, plan, start), out, trackers, args) or code


def _flags() -> Parser:
    flags = parser("tune", __doc__ or "", "TIER --recipe=NAME --tune=NAME=VALUES … --metric=NAME [any trainer flag]")
    flags.add_argument("tier", metavar="TIER", help="a file such as job_configs/l4x4.yaml, or its bare name, l4x4")
    flags.add_argument("--tune", action="append", default=[], metavar="NAME=VALUES", help="a setting and its values: "
                     "LOW..HIGH, LOW..HIGH:log (equal ratios), or a list, A,B,C; several --tune")  # fmt: skip
    flags.add_argument("--metric", default="", metavar="NAME", help="what the trials are judged by, as val_accuracy")
    flags.add_argument("--goal", choices=GOALS, default="", help="default: minimize a loss, maximize an accuracy")
    flags.add_argument("--trials", type=whole(1, 1000), default=20, metavar="COUNT", help="default: %(default)s")
    at_a_time = "trials at a time (default: 1); on this machine each has its own cores"
    flags.add_argument("--parallel", type=whole(1, 100), default=1, metavar="COUNT", help=at_a_time)
    seeds = "runs of each trial, with other seeds; only on this machine (default: 1)"
    flags.add_argument("--repeats", type=whole(1, 100), default=1, metavar="COUNT", help=seeds)
    flags.add_boolean(
        "pruning", "end a trial that is worse than the median of the others (default: true)", default=True
    )
    flags.add_argument(
        "--out", default="runs/tuning", metavar="FOLDER", help="folder of the study (default: %(default)s)"
    )
    dry_run = "check, print what would run and may cost, and stop"
    add_place_flags(flags, "a HyperparameterTuningJob of Vertex AI", dry_run, disable_retries=False)
    add_json_flag(flags)
    return flags


def _plan(args: Namespace, overrides: Overrides, command: str) -> StudyRequest:
    if not args.metric:
        raise UserError("metric is missing: name what the trials are judged by, as --metric=val_accuracy")
    for name, advice in {"job_dir": "--out names the folder", "tuning_metric": "--metric names it"}.items():
        if name in overrides.values:
            raise UserError(f"--{name} is not for a study: {advice}: leave it out")
    space = tuple(read_space(args.tune, overrides))
    _check_metric(args.metric, overrides.replace(**{parameter.name: parameter.samples()[0] for parameter in space}))
    tier = load_tier(args.tier, args.prices, read_changes(args))
    goal = goal_of(args.metric, args.goal)
    return StudyRequest(
        tier, overrides, space, args.metric, goal, args.trials, args.parallel, args.repeats, args.pruning, command
    )


def _check_metric(metric: str, overrides: Overrides) -> None:
    """Raises UserError if a run with these settings, which are checked later, never reports the metric."""
    with suppress(UserError):
        overrides.resolve()
        overrides = overrides.replace(tuning_metric=metric)
    if overrides.values.get("tuning_metric") == metric:
        overrides.resolve()


def _announce(plan: StudyRequest) -> None:
    """Prints what is tried."""
    say(plan.request(plan.first).about)
    for parameter in plan.space:
        say(f"varies {parameter.text}")
    most = configurations(plan.space)
    few = f" (there are no more than {most:,.0f} configurations)" if most < plan.trials else ""
    repeats = f", {plan.repeats} runs each" if plan.repeats > 1 else ""
    say(f"{plan.most_trials} trials{few}{repeats}, {plan.parallel} at a time, to {plan.goal} {plan.metric}")


def _on_vertex(
    plan: StudyRequest, out: Path, args: Namespace, overrides: Overrides, session: Session, trackers: str
) -> int:
    study = VertexStudy(plan, out, args, read_options(args, overrides), session)
    for line in study.describe():
        say(line)
    if args.dry_run:
        say(study.paste())
        return _write(args, out, StudyOutcome((), plan).content())
    code, trials = study.run()
    if not trials:
        return code
    flags = ("project", "region", "bucket", "package", "image", "service_account", "network", "labels", "kms_key")
    where = [f"--{name}={value}" for name in flags if (value := getattr(args, name))]
    start = ["python", "-m", "deploy", "submit", args.tier, *overrides.arguments(), *where]
    return _report(StudyOutcome(trials, plan, shlex.join(start), plan.tier.price_per_hour), out, trackers, args) or code


def _report(outcome: StudyOutcome, out: Path, trackers: str, args: Namespace) -> int:
    outcome.write(out)
    track([str(out)], trackers)
    _write(args, out, outcome.content())
    return DONE if outcome.complete else FAULT


def _write(args: Namespace, out: Path, content: Mapping[str, Any]) -> int:
    write_document(args, "tune", folder=str(out), **content)
    return DONE
