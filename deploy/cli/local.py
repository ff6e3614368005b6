"""Runs the workers of a job as processes of this machine: `python -m deploy local TIER --recipe=…`.

Each gets the variables that Vertex AI sets: TF_CONFIG, CLUSTER_SPEC, AIP_MODEL_DIR and others,
CLOUD_ML_JOB_ID. GPUs that this machine lacks are simulated as logical CPU devices. The local code
runs, not the spec's packages or image; a script, or a package, in JOB_DIR/code, a copy of what
would go along.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from deploy.api.request import parse_verb, verb_usage
from deploy.job.options import CodeOptions
from deploy.job.workload import ScriptRun, Training, workload_on
from deploy.packaging.packages import user_package, write_copy
from deploy.platform.local import LocalJob, LocalProgram, local_workers, on_signals
from deploy.tiers.spec_rules import task_of
from deploy.tiers.tier import ROOT, load_tier
from trainer.base.errors import DONE, UserError
from trainer.base.run_files.job_directory import open_job_dir
from trainer.base.run_files.job_files import CHECKPOINTS, mapping, read_run_info, step_of
from trainer.base.settings.fields import options_class, setting
from trainer.base.settings.request import Overrides
from trainer.base.storage import local_path, make_writable


@options_class
class LocalFlags(CodeOptions):
    """Holds the flags of `local`."""

    spec: str = setting(
        meaning="a tier, or a job spec as `submit --spec` prints it",
        metavar="TIER",
        positional=True,
    )
    restarts: int = setting(
        0,
        "how often a worker that fails is started again (default: 0; on Vertex AI: 5)",
        "COUNT",
        minimum=0,
        maximum=100,
    )


def main(arguments: Sequence[str]) -> int:
    """Runs the job and returns the exit code of its chief, or of a worker that failed."""
    request = parse_verb(
        LocalFlags, arguments, verb_usage("local", "TIER --recipe=NAME [any trainer flag]", __doc__)
    )
    program = request.program
    tier = load_tier(request.options.spec, "")
    # A script's spec has no code of this machine: the trainer would run in the script's place.
    for variable in task_of(tier.spec["workerPoolSpecs"][0]).get("env", []):
        if (
            isinstance(program, Overrides)
            and variable["name"] == "TRAINER_START"
            and '"script"' in variable["value"]
        ):
            raise UserError(
                f"{tier.name}: a script's job, whose code is in the bucket: name the code:"
                " --script=FILE"
            )
    workload = workload_on(tier, program)
    config = workload.trained
    job_id = f"local-{time.strftime('%Y%m%d-%H%M%S')}"
    job_dir = local_path(workload.job_dir, "job_dir") if workload.job_dir else Path("runs") / job_id
    # A folder that is not writable, or holds another run, is refused here rather than in workers
    # that wait for each other.
    if config:
        open_job_dir(replace(config, job_dir=str(job_dir)), lock=False)
    elif isinstance(workload, ScriptRun):
        make_writable(job_dir, "job_dir")
        info, _ = read_run_info(job_dir)
        name = workload.script.name
        held = mapping(info, "config").get("script", "a recipe" if info else name)
        if held != name:
            raise UserError(f"job_dir={job_dir}: it holds a run of {held}: use another --job_dir")
    folder = job_dir.absolute()
    what = workload.local_program(folder)
    # its modules are found in a copy of what goes along
    if request.options.package and isinstance(workload, Training):
        copy = folder / "code"
        write_copy(
            user_package(request.options.package, include=request.options.include, force=True), copy
        )
        what = LocalProgram(
            what.module, {"PYTHONPATH": f"{copy}{os.pathsep}{ROOT}", "PYTHONSAFEPATH": "1"}
        )
    workers = local_workers(tier, workload.arguments(), folder, job_id, request.command, what)
    # by line, the worker that printed it first: the trainer prints the same in each worker
    first: dict[str, str] = {}

    def print_line(worker: str, line: str) -> None:
        if not config or first.setdefault(line, worker) == worker:
            # in one write: lines of two threads would mix
            print(f"[{worker}] {line}\n", end="", flush=True)

    job = LocalJob(workers, print_line, request.options.restarts)
    if not isinstance(workload, Training):
        print(workload.about)
    print(f"{job_id}: rehearses {tier.machine}; writes to {job_dir}", flush=True)
    # the workers save and end
    with on_signals(lambda number, frame: job.stopped.set(), signal.SIGINT, signal.SIGTERM):
        outcome = job.run()
    print(
        f"{job_id}: JOB_STATE_{outcome.state}"
        + (f", {outcome.restarts} restarts" if outcome.restarts else "")
    )
    if outcome.state == "CANCELLED" and outcome.code != DONE:
        step = max((step_of(path.name) for path in (job_dir / CHECKPOINTS).glob("*")), default=-1)
        again = "again" if workload.job_dir else f"with --job_dir={job_dir}"
        resumes = (
            "starts from scratch: there is no checkpoint yet"
            if step < 0
            else f"resumes from step {step:,}"
        )
        print(f"{outcome.error or 'interrupted'}: the same command {again} {resumes}")
    elif outcome.error:
        print(f"error: {outcome.error}", file=sys.stderr)
    return outcome.code if config else outcome.status or outcome.code
