"""Runs one job from top to bottom: start, data and model, first state, training, export, result."""

import os
import platform
import secrets
import shlex
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import asdict

from keras.callbacks import Callback

from trainer.base.errors import DONE, INTERRUPTED, NotFinite
from trainer.base.log import duration, log, on_vertex
from trainer.base.run_files.goodput import RESTORE, START
from trainer.base.run_files.job_directory import JobDir
from trainer.base.run_files.job_files import (
    RUN_INFO,
    SKIPPED_IMAGES,
    RunInfo,
    mapping,
    trainer_commit,
)
from trainer.base.settings.accelerators import peak_tflops
from trainer.base.settings.fields import recording_reads, refuse_unused
from trainer.base.settings.own_settings import changed_settings
from trainer.base.settings.train_config import TrainConfig
from trainer.cluster.cluster_spec import gpu_environment
from trainer.cluster.devices import cpu_info, gpu_names
from trainer.cluster.strategy import Replicas, simulated_devices
from trainer.data.examples import first_not_finite
from trainer.invariance.gradients import keeps_averages, of_repeated_tokens, use_averages
from trainer.invariance.layers import depends_on_replicas, refresh_normalization
from trainer.measures.keras_calls import answered_by_replicas
from trainer.reporting.error_lines import is_out_of_memory, out_of_memory
from trainer.reporting.progress import Progress
from trainer.reporting.reporter import Reporter
from trainer.reporting.result import library_versions, refuse_hopeless_restart
from trainer.run.export import export
from trainer.run.job_watch import JobWatch
from trainer.run.proof import PROVED
from trainer.run.replica_check import (
    COMPARED_STEPS,
    ReplicaVerdict,
    act_on_verdict,
    comparing,
    needs_check,
)
from trainer.run.run_state import Best, RunState
from trainer.run.saved_model_check import DIFFERS, compare_saved
from trainer.run.start import StartedJob
from trainer.run.training_run import TrainingRun
from trainer.run.training_setup import (
    TrainingSetup,
    build_setup,
    set_precision_and_seed,
    starting_weights,
)
from trainer.training.callbacks import load_callbacks
from trainer.training.checkpoint import Checkpoints, LearningRates
from trainer.training.loop import Control
from trainer.training.signals import StopRequest, leave_on_signals, stop_on_signals
from trainer.training.xla_choice import XlaChoice
from trainer.user_code.interface import ModelInterface
from trainer.user_code.mistakes import message_of


def run(
    config: TrainConfig,
    command: Sequence[str],
    began: float,
    job_dir: JobDir | None = None,
    named: Collection[str] = (),
) -> int:
    """Runs the job and returns its exit code; raises UserError for what the user must change.

    `began`: time.monotonic() at the start of the process; `job_dir`: the job directory, if it is
        open already; `named`: the settings that the command names, of which each must have an
        effect.

    result.json records how the run ends; a failure before training leaves the result of a finished
    run as it is.
    """
    job = StartedJob.open(config, command, began, job_dir, named)
    signals = leave_on_signals() if job.cluster.several else nullcontext()

    with closing(job.job_dir.mirror), signals, job.tracking, job.workers():
        # It is refused once all workers have met, so that all of them end.
        refuse_hopeless_restart(config, job.result.before)
        if job.cluster.is_chief:
            job.refuse_changed_data("files", job.files)
        replicas = job.connect()

        # The chief compares one replica and two in a child process while the run is prepared.
        unchecked = job.cluster.is_chief and "replica_check" not in job.earlier
        compares = unchecked and needs_check(config, replicas.count)
        with comparing(command[3:]) if compares else nullcontext() as verdict:
            run = prepare_run(job, replicas)
            if ended := replicas.from_worker(_ended_before(run)):
                job.tracking.begin()  # sends to the tracker what an earlier start could not
                log.info(ended)
                return DONE

            # From here on the run is recorded, and trains once the check allows it.
            if job.cluster.is_chief:
                write_run_info(run)
            job.tracking.begin()
            if verdict:
                log.info("waits for the proof that replicas change nothing …")
                act_on_check(run, verdict())
            with closing(run.state.reporter):
                run.state.reporter.begin(repeats_step=run.state.pending)
                control = train_to_end(run)
                if not control.signal:
                    export_model(run)
            return finish(run, control)


def act_on_check(run: TrainingRun, verdict: ReplicaVerdict) -> None:
    """Records whether one replica and two give the same numbers.

    Raises UserError if they must and do not.
    """
    job = run.job
    replicas = run.setup.replicas
    paid = replicas.on_gpus and replicas.count > 1
    act_on_verdict(verdict, allowed=job.config.allow_replica_dependence, paid=paid)
    job.result.depends_on_replicas = verdict.problems
    job.result.not_compared = verdict.not_compared
    compared = "all" if verdict.proof == PROVED else f"1 to {COMPARED_STEPS}"
    job.result.replica_checks = {compared: verdict.outcome}
    # 0: the bits are equal on no other number of replicas.
    bits = {"equal_bits": 0} if verdict.problems else {}
    job.job_dir.add_to_run_info(
        replica_check=asdict(verdict), replica_checks=job.result.replica_checks, **bits
    )


def prepare_run(job: StartedJob, replicas: Replicas) -> TrainingRun:
    """Builds what a run needs, and restores its newest checkpoint or sets first weights."""
    config = job.config
    job_dir = job.job_dir
    job.result.goodput.enter(START)
    set_precision_and_seed(config)  # first, as importing a user's file may draw random numbers
    config_of_callbacks, used = recording_reads(config)
    callbacks = load_callbacks(config_of_callbacks)
    setup = build_setup(config, replicas)
    used |= {*setup.used}
    if ModelInterface.of(setup.model).sampler:
        used.add("sample_every_steps")
    refuse_unused(job.named, used, config)
    checkpoints = Checkpoints(
        setup.model, replicas, job_dir.checkpoints, config.keep_checkpoints, job_dir.mirror
    )
    return restored_run(job, setup, callbacks, checkpoints)


def restored_run(
    job: StartedJob,
    setup: TrainingSetup,
    callbacks: list[Callback],
    checkpoints: Checkpoints,
    first_step: int = 0,
    before: int = 0,
) -> TrainingRun:
    """Returns the run as its newest checkpoint has it.

    Without one it begins at `first_step`, and sets first weights.
    before: the steps of earlier calls of `fit` in a script, after which those of the checkpoints
        count.
    """
    config = setup.config
    replicas = setup.replicas
    for reason in _dependences(setup):
        log.warning(f"the result depends on the number of replicas: {reason}")
    if line := of_repeated_tokens(setup.model):
        log.info(line)
    source = f" of {config.data}" if config.data != config.model else ""  # a script is both
    log.info(
        f"trains {config.model} on {setup.dataset.train.count:,} examples{source},"
        f" {setup.dataset.shape}"
    )

    # Restores the variables, or sets the first ones.
    with job.result.goodput.within(RESTORE):
        step, saved = checkpoints.restore() or (before + first_step, None)
        if saved is not None:
            log.info(f"resumes at step {step:,} from {checkpoints.restored or 'the chief'}")
            refresh_normalization(setup.model)
        else:
            starting_weights(config, setup)

    # Makes the objects whose state a checkpoint also holds, and restores it.
    step -= before
    schedule = setup.schedule
    if schedule.left_out:
        log.info(
            f"each epoch trains on whole batches and leaves out {schedule.left_out:,} rows (fit has"
            " a last, smaller batch)"
        )
    progress = Progress(
        step,
        schedule.total_steps(config.steps, config.epochs),
        schedule.steps_per_epoch,
        schedule.examples_per_step,
        unit=setup.dataset.unit,
        peak_tflops=replicas.count * peak_tflops((*gpu_names(), "")[0], config),
        steps_before=before,
    )
    reporter = Reporter(
        config, job.result.job_dir, progress, lambda: checkpoints.latest, replicas.devices
    )
    best = Best(config, setup.model, callbacks)
    rates = LearningRates(setup.model)
    state = RunState(progress, reporter, best, callbacks, rates, str(checkpoints.restored))
    if saved is not None:
        state.resume(saved)

    # Settings may have changed before the first checkpoint, and run.json is then of another run.
    job.result.resume(progress)
    same_run = saved is not None or not changed_settings(mapping(job.earlier, "config"), config)
    earlier = job.earlier if same_run else {}
    job.xla_choice = job.xla_choice or XlaChoice.read(mapping(earlier, "compilation"))
    return TrainingRun(job, setup, checkpoints, state, earlier)


def _dependences(setup: TrainingSetup) -> list[str]:
    """Returns, a line each, why the result depends on the number of replicas."""
    config = setup.config
    if config.virtual_replicas:
        return []  # building the model has refused layers that depend on it
    return depends_on_replicas(setup.model, setup.replicas.count, config.micro_batches)


def _ended_before(run: TrainingRun) -> str | None:
    """Returns the line to log if an earlier start has already ended this run, else None.

    Only the chief decides.
    """
    before = run.job.result.before
    progress = run.state.progress
    job_dir = run.job.job_dir
    if not run.job.cluster.is_chief or before.get("steps") != progress.step:
        return None
    if not job_dir.mirror.holds(job_dir.model):
        return None

    # A finished run goes on only for more steps, and one that stopped early for more patience too.
    state = before.get("state")
    requested = progress.asked_steps
    if state == "done" and (progress.finished or before.get("asked_steps") == requested):
        more = f"more than {max(requested, progress.step):,} steps"
        steps = f"{progress.step:,} of {requested:,} steps"
        if progress.total_steps < requested:
            more += " and a larger --patience" if run.job.config.early_stopping else ""
            return f"finished already: stopped early after {steps}: use {more} to continue"
        return f"finished already: {steps} are done: use {more} to continue"

    # A spent budget ends the run again, unless it was raised.
    minutes = run.job.config.max_minutes
    if state == "budget" and minutes and before.get("wall_seconds", 0.0) >= 60 * minutes:
        steps = f"after {progress.step:,} steps"
        return (
            f"its budget of {minutes:g} minutes is spent {steps}: raise --max_minutes to continue"
        )
    return None


def write_run_info(run: TrainingRun, config: TrainConfig | None = None) -> None:
    """Writes run.json and the list of skipped images.

    config: the settings to record, by default those of the job. Raises UserError if the data have
    changed, or the versions of a run whose bits must be equal.
    """
    job = run.job
    setup = run.setup
    data = run.setup.dataset
    config = config or job.config
    job_dir = job.job_dir
    job.refuse_changed_data("content", setup.content)
    notes = dict(data.notes)
    if skipped := notes.pop("skipped", []):
        job_dir.write(SKIPPED_IMAGES, skipped)

    # The entries say what the numbers of the run depend on, and where they were made.
    replicas = setup.replicas
    schedule = setup.schedule
    strategy = type(replicas.strategy).__name__
    if replicas.cluster.several:
        strategy = "MultiWorkerMirroredStrategy"
    about: RunInfo = {
        "config": asdict(config),
        "batch": replicas.sentence(),
        "cluster": {
            "workers": replicas.cluster.workers,
            "addresses": list(replicas.cluster.addresses),
            "replicas": replicas.count,
            "rows_per_replica": replicas.rows,
        },
        "devices": list(replicas.devices),  # of each worker
        "gpus": gpu_names()[: replicas.local],  # of this worker
        "processor": cpu_info("model name") or platform.machine(),
        "gpu_environment": gpu_environment(),
        # The jobs of `deploy local` have no number: they are called local-…
        "on_vertex": os.environ.get("CLOUD_ML_JOB_ID", "").isdigit(),
        "simulated": simulated_devices() > 0,  # logical CPU devices stand for accelerators
        "strategy": strategy,
        "collectives": replicas.collectives,
        "data": {
            "examples": schedule.examples,
            "examples_per_step": schedule.examples_per_step,
            "steps_per_epoch": schedule.steps_per_epoch,
            "classes": list(data.class_names),
            "skipped": len(skipped),
            **notes,
            "example": data.shape,
            "unit": data.unit,
            "files": {} if "listing of data" in job.files else dict(job.files),
            "content": setup.content,
        },
        "total_steps": run.state.progress.total_steps,
        "versions": library_versions(),
        "git_commit": trainer_commit(),
        # `deploy local` sets it
        "command": os.environ.get("TRAINER_COMMAND") or shlex.join(job.command),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "depends_on_replicas": _dependences(setup),
        # It is replaced once this start has chosen.
        "compilation": dict(mapping(run.earlier, "compilation")),
        "versions_by_step": job.versions_by_step(run.earlier, run.state.progress.step),
        "id": run.earlier.get("id") or secrets.token_hex(8),
    }

    # A proof of an earlier start still holds.
    verdict = job.earlier.get("replica_check")
    if verdict:
        about["replica_check"] = verdict
        about["replica_checks"] = job.result.replica_checks
    if config.virtual_replicas and not (verdict or {}).get("problems"):
        about["equal_bits"] = config.virtual_replicas
    job_dir.write(RUN_INFO, about)
    if config.track:
        job_dir.mirror.finish()  # so that a restart elsewhere continues the same run of the tracker


def train_to_end(
    run: TrainingRun, stopping: Callable[[], AbstractContextManager[StopRequest]] | None = None
) -> Control:
    """Trains, and leaves the weights as `fit` does; returns why training ended.

    stopping: what makes signals ask for the end; by default `stop_on_signals`. Raises UserError
        with what to change if memory runs out.
    """
    setup = run.setup
    with _explaining_errors(run):
        run.write_result("running")
        with (
            answered_by_replicas(setup.replicas),  # where a callback evaluates or predicts
            setup.dataset.reading(),
            (stopping or stop_on_signals)() as stop,
            JobWatch(run.job, stop).watching(),
        ):
            control = run.train(stop)
    optimizer = ModelInterface.of(setup.model).optimizer
    if keeps_averages(optimizer) and not control.signal:
        log.info("sets the weights to their moving averages (use_ema), as fit does")
        with setup.replicas.strategy.scope():
            use_averages(optimizer)
    return control


def export_model(run: TrainingRun) -> None:
    """Exports the trained model, on the chief, and compares it with the one in memory."""
    job = run.job
    setup = run.setup
    data = run.setup.dataset
    if not job.cluster.is_chief:
        return
    with _explaining_errors(run):
        try:
            export(
                setup.model,
                job.job_dir.model,
                data.input_spec,
                save_optimizer=job.config.save_optimizer,
                image=data.image_shape if data.holds_images else (),
                class_names=data.class_names,
            )
        except Exception as error:
            if job.config.model != job.config.data or is_out_of_memory(error):
                raise
            # The script goes on with what it has trained, of which it was warned before.
            job.result.saved_model = f"not exported: {message_of(error)}"
            return
        try:
            outcome = compare_saved(setup, job.job_dir.model)
        # A failed comparison must not fail a run that is trained and saved.
        except Exception as error:
            outcome = f"not compared: {message_of(error)}"
        if outcome.startswith((DIFFERS, "not compared")):
            log.warning(f"the saved model: {outcome}")
        job.result.saved_model = outcome
        job.job_dir.mirror.put(job.job_dir.model)


@contextmanager
def _explaining_errors(run: TrainingRun) -> Iterator[None]:
    """Waits for the running checkpoint after an error in the block, and explains the error."""
    try:
        yield
    except Exception as error:
        with suppress(Exception):
            run.checkpoints.wait()  # an earlier checkpoint may still be on its way to the disk
        if is_out_of_memory(error):
            raise out_of_memory(run.job.config, run.setup.replicas) from error
        if (
            isinstance(error, NotFinite)
            and (row := first_not_finite(run.setup.dataset.train.arrays[:1])) is not None
        ):
            cause = f"x holds NaN or infinity, first in row {row:,}: fill or remove such rows first"
            raise NotFinite(f"{cause}; {error}") from error
        raise


def finish(run: TrainingRun, control: Control) -> int:
    """Writes result.json, logs how the run ended, its last values and where its files are.

    Returns the exit code.
    """
    job = run.job
    progress = run.state.progress
    mirror = run.job.job_dir.mirror

    # A signal has ended training: the same command goes on.
    if control.signal and not control.stopped:
        run.write_result("interrupted")
        mirror.leave()
        log.warning(
            f"{control.signal}: state saved at step {progress.run_step:,}; the same command resumes"
            " from it"
        )
        return INTERRUPTED

    # All other files are sent before result.json reports the end.
    spent = control.budget_spent and not progress.finished
    state = "budget" if spent else "done"
    mirror.finish()
    run.write_result("stopped" if control.stopped else state, control.stopped or None)
    mirror.finish()
    if control.stopped:
        log.warning(
            f"stopped: {control.stopped}: state saved at step {progress.run_step:,}; the same"
            " command resumes the run"
        )
        return DONE  # Vertex AI would restart any other exit code
    if spent:
        log.warning(
            f"the budget of {job.config.max_minutes:g} minutes is spent: raise --max_minutes to"
            " continue"
        )
    if not job.cluster.is_chief:
        return DONE

    # The chief logs times, last and best values, where the files are, and which command comes next.
    where = mirror.where
    rate = progress.whole.images_per_second
    speed = f", {rate:,.0f} {progress.unit}/s" if rate else ""
    doubt = "; one replica and two were not compared" if job.result.not_compared else ""
    wall = duration(job.result.wall_seconds)
    training = duration(progress.training_seconds)
    log.info(
        f"done: {progress.run_step:,} steps in {wall}, of which training {training}{speed}{doubt}"
    )
    final = run.state.reporter.summary()["final"]
    values = {**final.get("losses", {}), **final.get("metrics", {})}
    if values:
        log.info(f"last      {', '.join(f'{name} {value:.4g}' for name, value in values.items())}")
    if best := run.state.best.state:
        # The data of a script are the script, and no verb reads its checkpoints.
        flag = ": --checkpoint=best" if job.config.data != job.config.model else ""
        log.info(f"best      {best['metric']} {best['value']:.4g} at step {best['step']:,}{flag}")
    exported = not (job.result.saved_model or "").startswith("not exported")
    log.info(f"model     {where(job.job_dir.model) if exported else job.result.saved_model}")
    pictures = ModelInterface.of(run.setup.model).sampler is not None
    if pictures:
        log.info(f"pictures  {where(job.job_dir.samples)}")
    if exported and not on_vertex():
        verb = "generate" if pictures else "serve"
        log.info(f"next      python -m trainer.{verb} {shlex.quote(job.config.job_dir)}")
    return DONE
