"""Tries settings of one recipe and reports the best: `python -m deploy tune TIER --recipe=… --tune=NAME=VALUES`.

Each --tune names a setting, one of your functions' too, and its values: learning_rate=1e-5..1e-3:log, dropout=0..0.5
or width=16,32. On this machine (--on=local) every trial is an ordinary job directory; on Vertex AI the study is one
HyperparameterTuningJob. The same command again goes on: no finished trial is repeated.
"""

import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

from deploy.cli.arguments import command_line, parse, parser
from deploy.cli.job_flags import add_place_flags, read_changes, read_options, refuse_flags_of_vertex
from deploy.study.local_study import LocalStudy
from deploy.study.outcome import StudyOutcome
from deploy.study.page import write_outcome
from deploy.study.space import check_space, configurations, read_space
from deploy.study.study_request import GOALS, StudyRequest, check_study_folder, goal_of, is_old
from deploy.study.trials import read_old_trials
from deploy.study.vertex_study import VertexStudy
from deploy.tiers.checks import sent_to_the_cloud
from deploy.tiers.tier import load_tier
from deploy.vertex.session import SESSION, Session
from trainer.base.errors import DONE, FAULT, INTERRUPTED, UserError
from trainer.base.settings.flags import Parser, whole
from trainer.base.settings.resolution import Overrides
from trainer.base.storage import local_path


def main(arguments: Sequence[str], session: Session = SESSION) -> int:
    """Runs the study and writes its results; returns 0 if a trial is complete and none is left to resume."""
    found, overrides = parse(_flags(), arguments)
    plan = _plan(found, overrides, command_line("tune", arguments))
    out = local_path(found.out, "out")
    with sent_to_the_cloud() if found.on == "vertex" else nullcontext():
        check_space(plan.space, plan.request)
    check_study_folder(out, plan.asked(found.on))
    _announce(plan)
    if found.on == "vertex":
        return _on_vertex(plan, out, found, overrides, session)
    refuse_flags_of_vertex(found)
    if found.dry_run:
        return DONE
    start = shlex.join(["python", "-m", "trainer.task", *overrides.arguments(), "--job_dir=runs/best"])
    if is_old(out):
        print(f"{out} holds a study of the older form (trial.json): it is reported, not continued: use another --out")
        return _report(StudyOutcome(list(read_old_trials(out, plan)), plan, start), out)
    try:
        code, trials = LocalStudy(plan, out).run()
    except KeyboardInterrupt:
        print("stopped: run the same command again to go on", file=sys.stderr)
        return INTERRUPTED
    return _report(StudyOutcome(trials, plan, start), out) or code


def _flags() -> Parser:
    own = parser("tune", __doc__ or "", "TIER --recipe=NAME --tune=NAME=VALUES … --metric=NAME [any trainer flag]")
    own.add_argument("tier", metavar="TIER", help="a file such as job_configs/l4x4.yaml, or its bare name, l4x4")
    own.add_argument("--tune", action="append", default=[], metavar="NAME=VALUES", help="a setting and its values: "
                     "LOW..HIGH, LOW..HIGH:log (equal ratios), or a list, A,B,C; several --tune")  # fmt: skip
    own.add_argument("--metric", default="", metavar="NAME", help="what the trials are judged by, as val_accuracy")
    own.add_argument("--goal", choices=GOALS, default="", help="default: minimize a loss, maximize an accuracy")
    own.add_argument("--trials", type=whole(1, 1000), default=20, metavar="COUNT", help="default: %(default)s")
    own.add_argument("--parallel", type=whole(1, 100), default=1, metavar="COUNT", help="trials at a time (default: 1);"
                     " on this machine each has its own cores")  # fmt: skip
    own.add_argument("--repeats", type=whole(1, 100), default=1, metavar="COUNT", help="runs of each trial, with other"
                     " seeds; only on this machine (default: 1)")  # fmt: skip
    own.add_boolean("pruning", "end a trial that is worse than the median of the others (default: true)", default=True)
    own.add_argument(
        "--out", default="runs/tuning", metavar="FOLDER", help="folder of the study (default: %(default)s)"
    )
    dry_run = "check, print what would run and may cost, and stop"
    add_place_flags(own, "a HyperparameterTuningJob of Vertex AI", dry_run, disable_retries=False)
    return own


def _plan(found: Namespace, overrides: Overrides, command: str) -> StudyRequest:
    if not found.metric:
        raise UserError("metric is missing: name what the trials are judged by, as --metric=val_accuracy")
    for name, advice in {"job_dir": "--out names the folder", "tuning_metric": "--metric names it"}.items():
        if name in overrides.values:
            raise UserError(f"--{name} is not for a study: {advice}: leave it out")
    space = tuple(read_space(found.tune, overrides))
    _check_metric(found.metric, overrides.replace(**{one.name: one.samples()[0] for one in space}))
    tier = load_tier(found.tier, found.prices, read_changes(found))
    goal = goal_of(found.metric, found.goal)
    return StudyRequest(
        tier, overrides, space, found.metric, goal, found.trials, found.parallel, found.repeats, found.pruning, command
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
    print(plan.request(plan.first).about)
    for parameter in plan.space:
        print(f"varies {parameter.text}")
    most = configurations(plan.space)
    few = f" (there are no more than {most:,.0f} configurations)" if most < plan.trials else ""
    repeats = f", {plan.repeats} runs each" if plan.repeats > 1 else ""
    print(
        f"{plan.most_trials} trials{few}{repeats}, {plan.parallel} at a time, to {plan.goal} {plan.metric}", flush=True
    )


def _on_vertex(plan: StudyRequest, out: Path, found: Namespace, overrides: Overrides, session: Session) -> int:
    study = VertexStudy(plan, out, found, read_options(found, overrides), session)
    for line in study.describe():
        print(line, flush=True)
    if found.dry_run:
        print(study.paste())
        return DONE
    code, trials = study.run()
    if not trials:
        return code
    flags = ("project", "region", "bucket", "package", "image", "service_account", "network", "labels", "kms_key")
    where = [f"--{name}={value}" for name in flags if (value := getattr(found, name))]
    start = ["python", "-m", "deploy", "submit", found.tier, *overrides.arguments(), *where]
    return _report(StudyOutcome(trials, plan, shlex.join(start), plan.tier.price_per_hour), out) or code


def _report(outcome: StudyOutcome, out: Path) -> int:
    values = outcome.plan.overrides.values
    subject = Path(str(values.get("recipe") or values.get("model") or "Training")).stem
    write_outcome(outcome, out, f"{subject}: {', '.join(parameter.name for parameter in outcome.plan.space)}")
    return DONE if outcome.complete else FAULT
