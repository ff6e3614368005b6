"""Runs the workers of a job as processes of this machine: `python -m deploy local TIER --recipe=…`.

Each gets the variables that Vertex AI sets: TF_CONFIG, CLUSTER_SPEC, AIP_MODEL_DIR and others, CLOUD_ML_JOB_ID. GPUs
that this machine lacks are simulated as logical CPU devices. The local code runs, not the spec's packages or image.
"""

import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from deploy.client.arguments import add_flags, command_line, parse_program, parser
from deploy.localrun.processes import LocalJob, checkpoint_step, on_signals
from deploy.localrun.workers import local_workers
from deploy.tiers.job_spec import request_on
from deploy.tiers.tier import Tier, load_tier
from trainer.base.errors import DONE, UserError
from trainer.base.settings.fields import whole
from trainer.base.settings.resolution import Overrides
from trainer.base.storage import local_path


def main(arguments: Sequence[str]) -> int:
    """Runs the job to its end and returns the exit code of its chief, or of the worker that failed it."""
    cli = parser("local", __doc__ or "", "TIER --recipe=NAME [any trainer flag]")
    cli.add_argument("spec", metavar="TIER", help="a tier, or a job spec as `submit --spec` prints it")
    cli.add_argument("--restarts", type=whole(0, 100), default=0, metavar="COUNT",
                     help="how often a worker that fails is started again (default: 0; on Vertex AI: 5)")  # fmt: skip
    add_flags(cli, "script", "module")
    args, program = parse_program(cli, arguments)
    tier = load_tier(args.spec, "")
    if isinstance(program, Overrides):
        _refuse_script(tier)
    request = request_on(tier, program)
    job_id = f"local-{time.strftime('%Y%m%d-%H%M%S')}"
    job_dir = local_path(request.job_dir, "job_dir") if request.job_dir else Path("runs") / job_id
    request.check_folder(job_dir)  # fails here rather than in workers that wait for each other
    command, folder = command_line("local", arguments), job_dir.absolute()
    command_and_files = request.local_program(folder)
    workers = local_workers(tier, request.arguments(), folder, job_id, command, program=command_and_files)
    job = LocalJob(workers, _printer(), args.restarts)
    print(f"{job_id}: rehearses {tier.machine}; writes to {job_dir}", flush=True)
    with on_signals(lambda number, frame: job.stop(), signal.SIGINT, signal.SIGTERM):  # the workers save and end
        outcome = job.run()
    print(f"{job_id}: JOB_STATE_{outcome.state}" + (f", {outcome.restarts} restarts" if outcome.restarts else ""))
    if outcome.state == "CANCELLED" and outcome.code != DONE:
        print(f"{outcome.error or 'interrupted'}: {_how_to_resume(job_dir, named=bool(request.job_dir))}")
    elif outcome.error:
        print(f"error: {outcome.error}", file=sys.stderr)
    return outcome.code if request.training else outcome.status or outcome.code


def _refuse_script(tier: Tier) -> None:
    """Raises UserError if the spec is that of a script's job, in whose place the trainer would run here."""
    for variable in tier.spec["workerPoolSpecs"][0].get("containerSpec", {}).get("env", []):
        if variable["name"] == "TRAINER_START" and '"script"' in variable.get("value", ""):
            raise UserError(f"{tier.name}: a script's job, whose code is in the bucket: name the code: --script=FILE")


def _how_to_resume(job_dir: Path, *, named: bool) -> str:
    """Returns how to resume a stopped job. `named`: its job directory was given on the command line."""
    step = checkpoint_step(job_dir)
    again = "the same command again" if named else f"the same command with --job_dir={job_dir}"
    return (
        f"{again} starts from scratch: there is no checkpoint yet"
        if step is None
        else f"{again} resumes from step {step:,}"
    )


def _printer() -> Callable[[str, str], None]:
    lock = threading.Lock()

    def print_line(worker: str, line: str) -> None:
        with lock:
            print(f"[{worker}] {line}", flush=True)

    return print_line
