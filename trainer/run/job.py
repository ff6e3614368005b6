"""Runs one job: cluster, job directory, workers, devices, data and model, first state, training, export, result."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from typing import Any

import tensorflow as tf

from trainer.base.errors import DONE, FAULT, INTERRUPTED, USER_MUST_CHANGE, NotFinite, UserError
from trainer.base.log import log
from trainer.base.run_files.initial import fetch_checkpoint, fetch_model
from trainer.base.run_files.job_directory import JobDir, open_job_dir
from trainer.base.run_files.records import drop_stats_after, last_reported_step, mapping, read_run_info
from trainer.base.run_files.run_layout import RUN_INFO, SKIPPED_IMAGES
from trainer.base.settings.own_settings import fixed_settings
from trainer.base.settings.train_config import TrainConfig
from trainer.cluster.arithmetic import arithmetic
from trainer.cluster.cluster_spec import Cluster, read_cluster
from trainer.cluster.meeting import Peers, meet
from trainer.cluster.strategy import Replicas, local_devices, make_replicas
from trainer.data.in_memory import first_unfit_input
from trainer.invariance.averaging import use_averages
from trainer.invariance.layers import depends_on_replicas, refresh_normalization
from trainer.reporting.progress import Progress
from trainer.reporting.reporter import Reporter
from trainer.reporting.result import RunResult, refuse_hopeless_restart
from trainer.reporting.run_info import run_info, versions
from trainer.run.build import TrainingSetup, build_setup
from trainer.run.data_changes import data_files, refuse_changed_data
from trainer.run.export import export, load_template_weights
from trainer.run.hooks import Best
from trainer.run.training_run import TrainingRun, readable_state
from trainer.training.callbacks import load_callbacks
from trainer.training.checkpoint import Checkpoints, load_weights
from trainer.training.compilation import Choice
from trainer.training.error_lines import is_out_of_memory, one_line, out_of_memory
from trainer.training.preemption import keep_handlers, leave_on_signals, stop_on_signals
from trainer.training.state import LearningRates
from trainer.user_code.interface import ModelInterface
from trainer.user_code.mistakes import as_user_mistake

_MOST_ROLLBACKS = 2


def run(config: TrainConfig, command: Sequence[str], began: float, job_dir: JobDir | None = None) -> int:
    """Runs the job and returns its exit code; raises UserError for what the user must change.

    `began`: time.monotonic() at the start of the process; `job_dir`: the job directory, if it is open already.

    result.json records how a run ends. A run that fails before training keeps the result of a finished one before it.
    """
    cluster = read_cluster()
    if cluster.note:
        log.warning(cluster.note)
    job_dir = job_dir or open_job_dir(config, make=cluster.is_chief)
    earlier = job_dir.read_result() if cluster.is_chief else {}
    result = RunResult.from_previous(config, earlier, began)
    job_dir.mirror.begin(job_dir.logs)
    files = data_files(config)
    signals = leave_on_signals() if cluster.several else nullcontext()
    with closing(job_dir.mirror), signals, _workers(config, cluster, job_dir, result, files) as peers:
        refuse_hopeless_restart(config, earlier)  # after the meeting, so that the other workers are notified
        if cluster.is_chief:
            refuse_changed_data(config, job_dir, "files", files)
        replicas = _connected(config, cluster, peers)
        by = f", summed by {replicas.collectives}" if cluster.several else ""
        log.info(f"{replicas.sentence()} on {', '.join(replicas.devices)}{by}")
        result.rollbacks = replicas.from_chief(result.rollbacks)
        while True:
            try:
                return _attempt(prepare(config, replicas, job_dir, result, peers), command, files)
            except NotFinite as error:
                if config.on_nan != "rollback" or result.rollbacks >= _MOST_ROLLBACKS:
                    raise
                result.rollbacks += 1
                log.warning(f"{error}; resumes from the last checkpoint with half the learning rate")


@contextmanager
def _workers(
    config: TrainConfig, cluster: Cluster, job_dir: JobDir, result: RunResult, files: Mapping[str, Any]
) -> Iterator[Peers | None]:
    """Connects to the other workers within the block and notifies them of its end; writes a failure to result.json."""

    def write_failure(error: str, code: int) -> None:
        with suppress(UserError):  # if result.json cannot be written either, the first error is the one to report
            if cluster.is_chief and (known := job_dir.read_result()).get("state") != "done":
                job_dir.write_result(result.failure(error, code, known))
        job_dir.mirror.leave()

    peers = None
    try:
        if cluster.several:
            devices = {"devices": len(local_devices(config, cluster))}
            runs = {**versions(), **devices, **dataclasses.asdict(config), **arithmetic(), **files}
            peers = meet(cluster, runs, config.worker_timeout_seconds, write_failure)
        yield peers
        if peers:
            peers.finish()
    except Exception as error:
        mistake = as_user_mistake(error)
        if peers and isinstance(error, tf.errors.OpError) and not mistake:
            peers.await_verdict()  # the cause may be a lost worker, which is then reported by name
        line, code = one_line(mistake or error), USER_MUST_CHANGE if isinstance(mistake or error, UserError) else FAULT
        if peers:
            peers.fail(code, line)
        write_failure(line, code)
        if mistake:
            raise mistake from error
        raise


def _connected(config: TrainConfig, cluster: Cluster, peers: Peers | None) -> Replicas:
    """Starts TensorFlow, on all workers at once if there are several."""
    if peers is None:
        return make_replicas(config, cluster)
    with peers.connecting():
        replicas = make_replicas(config, cluster)
    keep_handlers()
    return replicas


def _attempt(job: TrainingRun, command: Sequence[str], files: Mapping[str, Any]) -> int:
    """Runs the job from its newest checkpoint; raises NotFinite if it has to go back to that one."""
    if ended := job.setup.replicas.from_chief(_ended_before(job)):
        log.info(ended)
        return DONE
    if job.is_chief:
        _describe(job, command, files)
    return _train_and_export(job)


def prepare(
    config: TrainConfig, replicas: Replicas, job_dir: JobDir, result: RunResult, peers: Peers | None = None
) -> TrainingRun:
    """Builds callbacks, data and model, and restores the state to resume from."""
    callbacks = load_callbacks(config)
    scale = 0.5**result.rollbacks
    names = [name for name in ("learning_rate", "fine_tune_learning_rate") if hasattr(config, name)]
    rates = {name: getattr(config, name) * scale for name in names}
    setup = build_setup(dataclasses.replace(config, **rates), replicas)
    for reason in depends_on_replicas(setup.model, replicas.count, config.micro_batches):
        log.warning(f"the result depends on the number of replicas: {reason}")
    checkpoints = Checkpoints(setup.model, replicas, job_dir.checkpoints, config.keep_checkpoints, job_dir.mirror)
    log.info(f"trains {config.model} on {setup.dataset.train.count:,} examples of {config.data}, {setup.dataset.shape}")
    restored = _initialise(config, setup, checkpoints)
    schedule = setup.schedule
    total = schedule.total_steps(config.steps, config.epochs)
    progress = Progress(restored.get("step", 0), total, schedule.steps_per_epoch, schedule.examples_per_step)
    progress.unit = setup.dataset.unit
    best = Best(config, setup.model)
    if restored:
        with readable_state(checkpoints):
            progress.resume(restored)
            best.resume(restored["best"])
    result.resume(progress, last_reported_step(job_dir.root) if replicas.cluster.is_chief else 0)
    given = LearningRates(setup.model)
    choice = _earlier_choice(config, job_dir, resumed=bool(restored))
    return TrainingRun(
        config, job_dir, result, peers, setup, callbacks, given, checkpoints, progress, restored, best, choice
    )


def _earlier_choice(config: TrainConfig, job_dir: JobDir, *, resumed: bool) -> Choice | None:
    """Returns whether XLA compiled the steps of this run before: a new run of other settings chooses again."""
    about, _ = read_run_info(job_dir.root)
    before, now = mapping(about, "config"), fixed_settings(config)
    same = all(before.get(name) == value for name, value in now.items())
    return Choice.read(mapping(about, "compilation")) if resumed or same else None


def _initialise(config: TrainConfig, setup: TrainingSetup, checkpoints: Checkpoints) -> dict[str, Any]:
    """Loads this job's checkpoint, else weights of another run's, else of a template; returns the restored state."""
    if restored := checkpoints.restore():
        log.info(f"resumes at step {restored['step']:,} from {checkpoints.restored or 'the chief'}")
    elif config.initial_checkpoint:
        folder = fetch_checkpoint(config.initial_checkpoint, "initial_checkpoint", config.cache_dir)
        load_weights(setup.model, folder, setup.replicas)
        log.info(f"starts from the weights in {config.initial_checkpoint}")
    elif config.initial_model:
        file = fetch_model(config.initial_model, "initial_model", config.cache_dir)
        with setup.replicas.strategy.scope():
            load_template_weights(setup.model, file)
        log.info(f"starts from the weights of {config.initial_model}")
    else:
        log.info("starts from scratch")
    refresh_normalization(setup.model)
    return restored


def _ended_before(job: TrainingRun) -> str | None:
    """Returns what to report if this run has nothing left to do."""
    earlier, progress = job.result.before, job.progress
    if not job.is_chief or earlier.get("steps") != progress.step or not job.job_dir.mirror.holds(job.job_dir.model):
        return None
    wanted, done, is_done = progress.asked_steps, progress.step, earlier.get("state") == "done"
    if is_done and progress.finished and progress.total_steps < wanted:
        more = "more steps and a larger --patience" if job.config.early_stopping else "more steps"
        return f"finished already: stopped early after {done:,} of {wanted:,} steps: use {more} to continue"
    if is_done and (progress.finished or earlier.get("asked_steps") == wanted):
        return f"finished already: {done:,} of {wanted:,} steps are done: use more steps to continue"
    minutes = job.config.max_minutes
    if earlier.get("state") == "budget" and minutes and job.result.wall_seconds_before >= 60 * minutes:
        return f"its budget of {minutes:g} minutes is spent after {done:,} steps: raise --max_minutes to continue"
    return None


def _describe(job: TrainingRun, command: Sequence[str], files: Mapping[str, Any]) -> None:
    """Writes run.json, and the list of images that were skipped. Raises UserError if the data have changed."""
    setup, job_dir = job.setup, job.job_dir
    refuse_changed_data(job.config, job_dir, "content", setup.content)
    about = run_info(job.config, command, setup.replicas, setup.schedule, job.progress.total_steps)
    notes = dict(setup.dataset.notes)
    if skipped := notes.pop("skipped", []):
        job_dir.write(SKIPPED_IMAGES, skipped)
    about["data"] |= {"classes": list(setup.dataset.class_names), "skipped": len(skipped), **notes}
    about["data"] |= {"example": setup.dataset.shape, "unit": setup.dataset.unit}
    about["data"] |= {"files": dict(files), "content": setup.content}
    about["depends_on_replicas"] = depends_on_replicas(setup.model, setup.replicas.count, job.config.micro_batches)
    about["compilation"] = dataclasses.asdict(job.choice) if job.choice else {}  # until this start has chosen
    job_dir.write(RUN_INFO, about)


def _train_and_export(job: TrainingRun) -> int:
    """Trains, exports the model and writes the result; returns the exit code."""
    progress, job_dir = job.progress, job.job_dir
    if job.is_chief and job.pending:
        drop_stats_after(job_dir.root, progress.step - 1)  # the pending hooks report this step again
    reporter = Reporter(
        job.config, job_dir if job.is_chief else None, progress, lambda: job.checkpoints.latest,
        job.setup.replicas.devices,
    )  # fmt: skip
    try:
        job.write_result("running", reporter)
        with job.setup.dataset.reading(), stop_on_signals() as stop:
            control = job.train(reporter, stop)
            interrupted = control.signal is not None
            job.save(reporter, pending=interrupted)
            job.checkpoints.wait()
        if job.is_chief and not interrupted:
            if optimizer := ModelInterface.of(job.setup.model).optimizer:
                use_averages(optimizer, job.setup.model.trainable_variables)
            export(job.setup.model, job_dir.model, job.setup.dataset.input_spec)
            job_dir.mirror.put(job_dir.model)
    except Exception as error:
        with suppress(Exception):
            job.checkpoints.wait()  # an earlier checkpoint may still be on its way to the disk
        if is_out_of_memory(error):
            raise out_of_memory(job.config, job.setup.replicas) from error
        if isinstance(error, NotFinite) and (row := first_unfit_input(job.setup.dataset.train)) is not None:
            found = f"x holds NaN or infinity, first in row {row:,}: fill or remove such rows first"
            raise NotFinite(f"{found}; {error}") from error
        raise
    finally:
        reporter.close()
    if interrupted:
        job.write_result("interrupted", reporter)
        job_dir.mirror.leave()
        log.warning(f"{control.signal}: state saved at step {progress.step:,}; the same command resumes from it")
        return INTERRUPTED
    job_dir.mirror.finish()  # all other files are sent before result.json reports the end
    spent = control.budget_spent and not progress.finished
    job.write_result("budget" if spent else "done", reporter)
    job_dir.mirror.finish()
    state = f"the budget of {job.config.max_minutes:g} minutes is spent after" if spent else "done:"
    where = f"; the model is in {job_dir.mirror.where(job_dir.model)}" if job.is_chief else ""
    log.info(f"{state} {progress.step:,} steps{where}")
    return DONE
