"""One job, readable from the top: job directory, devices, data, model, resume, train, export, result."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import keras
import tensorflow as tf

from trainer.config import TrainConfig
from trainer.data.augment import augmentation
from trainer.data.batches import Schedule, batches
from trainer.data.dataset import Dataset
from trainer.data.sources import beside_data, load_dataset
from trainer.distribution.strategy import Replicas, make_replicas
from trainer.errors import DONE, INTERRUPTED, UserError
from trainer.export import export
from trainer.jobdir import JobDir, open_job_dir, write_json
from trainer.log import log
from trainer.models import build_model, depends_on_replicas
from trainer.progress import Progress
from trainer.record import describe, ended, failed
from trainer.reporting.reporter import Reporter
from trainer.storage import write_whole
from trainer.training.callbacks import bind, load_callbacks
from trainer.training.checkpoint import Checkpoints
from trainer.training.evaluate import Evaluation, evaluation
from trainer.training.fid import Extractor, Fid
from trainer.training.loop import CallSize, Event, train
from trainer.training.preemption import StopRequest, stop_on_signals
from trainer.training.steps import StepRunner


@dataclass
class Job:
    """The parts of one run, put together and ready to train."""

    config: TrainConfig
    job_dir: JobDir
    replicas: Replicas
    dataset: Dataset
    schedule: Schedule
    model: keras.Model
    callbacks: list[keras.callbacks.Callback]
    checkpoints: Checkpoints
    progress: Progress


def run(config: TrainConfig, command: Sequence[str], began: float) -> int:
    """Runs the job and returns its exit code. `began`: time.monotonic() at the start of the process.

    What the user must change is raised as UserError. However a run ends, result.json says so; a run that does not come
    to train leaves the result of a finished one before it alone.
    """
    job_dir = open_job_dir(config)
    try:
        job = prepare(config, job_dir)
    except Exception as error:
        if job_dir.read_result().get("state") != "done":
            job_dir.write_result(failed(_one_line(error), began))
        raise
    if job.progress.finished and job_dir.read_result().get("state") == "done" and job_dir.model.is_dir():
        done, asked = job.progress.step, job.progress.total_steps
        log.info(f"finished already: {done:,} steps are done, {asked:,} were asked for: give more to go on")
        return DONE
    _describe(job, command)
    return _train_and_export(job, began)


def prepare(config: TrainConfig, job_dir: JobDir) -> Job:
    """Devices, callbacks, data, model, and the state to go on from."""
    set_precision_and_seed(config)
    replicas = make_replicas(config)
    log.info(f"{replicas.sentence()} on {', '.join(replicas.devices)}")
    callbacks = load_callbacks(config)
    dataset = load_dataset(config)
    with replicas.strategy.scope():
        model = build_model(config, dataset)
    for reason in depends_on_replicas(model, replicas.count):
        log.warning(f"the result depends on the number of replicas: {reason}")
    batches_per_step = getattr(model, "batches_per_step", 1)
    schedule = Schedule(dataset.train.count, config.global_batch_size, batches_per_step, config.seed)
    checkpoints = Checkpoints(model, job_dir.checkpoints, config.keep_checkpoints)
    step = checkpoints.restore()
    log.info(f"resumes at step {step:,} from {checkpoints.restored}" if step else "starts from scratch")
    total = schedule.total_steps(config.steps, config.epochs)
    progress = Progress(step, total, schedule.steps_per_epoch, schedule.examples_per_step)
    return Job(config, job_dir, replicas, dataset, schedule, model, callbacks, checkpoints, progress)


def set_precision_and_seed(config: TrainConfig) -> None:
    """Sets the arithmetic of every layer made from here on, and the seed of its first weights."""
    keras.config.set_floatx("float64" if config.precision == "float64" else "float32")
    keras.config.set_dtype_policy(config.precision)
    keras.utils.set_random_seed(config.seed)


def _describe(job: Job, command: Sequence[str]) -> None:
    """Writes run.json, and the list of images that were left out."""
    about = describe(job.config, command, job.replicas, job.schedule, job.progress.total_steps)
    notes = dict(job.dataset.notes)
    skipped = notes.pop("skipped", [])
    if skipped:
        write_whole(job.job_dir.root / "skipped_images.txt", "\n".join(skipped) + "\n")
    about["data"] |= {"classes": list(job.dataset.class_names), "skipped": len(skipped), **notes}
    about["depends_on_replicas"] = depends_on_replicas(job.model, job.replicas.count)
    write_json(job.job_dir.run_file, about)


def _train_and_export(job: Job, began: float) -> int:
    config, progress = job.config, job.progress
    reporter = Reporter(config, job.job_dir, progress, lambda: job.checkpoints.latest)

    def write_result(state: str, error: str | None = None) -> None:
        job.job_dir.write_result({**ended(state, progress, began, error), **reporter.summary()})

    write_result("running")
    try:
        with stop_on_signals() as stop:
            _train(job, reporter, stop)
        if stop and not progress.finished:
            job.checkpoints.save(progress.step)
            write_result("interrupted")
            log.warning(f"{stop.signal}: state saved at step {progress.step:,}; the same command again goes on")
            return INTERRUPTED
        export(job.model, job.job_dir.model, job.dataset.image_shape)
    except Exception as error:
        memory = is_out_of_memory(error)
        text = _out_of_memory(config, job.replicas) if memory else _one_line(error)
        write_result("failed", text)
        if memory:
            raise UserError(text) from error
        raise
    finally:
        reporter.close()
    write_result("done")
    log.info(f"done: {progress.step:,} steps; the model is in {job.job_dir.model}")
    return DONE


def _train(job: Job, reporter: Reporter, stop: StopRequest) -> None:
    config, model, progress, replicas = job.config, job.model, job.progress, job.replicas
    evaluate = evaluation(model, replicas, job.dataset.evaluation)
    callbacks = bind(job.callbacks, model, progress, evaluates=evaluate is not None)
    rows = batches(
        job.dataset.train, job.schedule,
        first_step=progress.step, first_row=0, rows=replicas.rows, replicas=replicas.count,
    )  # fmt: skip
    run_steps = StepRunner(model, replicas, config.seed, augmentation(config))
    events = _events(job, reporter, callbacks, evaluate)
    size = CallSize(config.steps_per_loop)
    model.stop_training = False
    callbacks.on_train_begin()
    callbacks.on_epoch_begin(int(progress.epoch))
    train(run_steps, iter(rows), progress, events, callbacks, reporter.on_call, size, stop)
    callbacks.on_train_end()


def _events(
    job: Job, reporter: Reporter, callbacks: keras.callbacks.CallbackList, evaluate: Evaluation | None
) -> list[Event]:
    """What happens between calls to the device, in this order."""

    def end_epoch(progress: Progress) -> None:
        means = reporter.epoch_end(progress)
        callbacks.on_epoch_end(int(progress.epoch) - 1, means)
        if not progress.finished:
            callbacks.on_epoch_begin(int(progress.epoch))

    config, steps_per_epoch = job.config, job.schedule.steps_per_epoch
    events = [Event(config.report_every_steps, reporter.report)]
    if evaluate:
        events.append(Event(steps_per_epoch, lambda progress: reporter.evaluated(progress, evaluate())))
    if config.fid_every_steps:
        events.append(Event(config.fid_every_steps, _fid(job, reporter)))
    # Calls are cut at epoch ends too: an epoch's seconds are then measured, not apportioned.
    events.append(Event(steps_per_epoch, end_epoch, at_end=False))
    events.append(Event(config.checkpoint_every_steps, lambda progress: job.checkpoints.save(progress.step)))
    if hasattr(job.model, "sample"):
        events.append(Event(config.sample_every_steps, lambda progress: reporter.sample(job.model, progress)))
    return events


def _fid(job: Job, reporter: Reporter) -> Callable[[Progress], None]:
    config = job.config
    if not hasattr(job.model, "averaged_generator"):
        raise UserError(f"fid_every_steps={config.fid_every_steps}: {config.model} generates no images: drop the flag")
    with job.replicas.strategy.scope():
        extractor = Extractor(config.fid_features, config.fid_weights)
    fid = Fid(job.model, job.replicas, extractor, job.dataset.train, config.fid_samples, config.seed)
    cache = beside_data(config.data, job.job_dir.root) / f".fid-{extractor.identity}.npz"
    return lambda progress: reporter.quality(progress, fid(cache), config.fid_features, fid.samples)


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out: on several devices the first error to arrive may be another one that speaks of it."""
    if isinstance(error, (tf.errors.ResourceExhaustedError, MemoryError)):
        return True
    signs = ("OOM when allocating", "RESOURCE_EXHAUSTED", "OUT_OF_MEMORY")
    return isinstance(error, tf.errors.OpError) and any(sign in str(error) for sign in signs)


def _out_of_memory(config: TrainConfig, replicas: Replicas) -> str:
    more = ", use more replicas" if replicas.devices[0].startswith("GPU") else ""
    return (
        f"out of memory with {replicas.sentence()}, image_size={config.image_size}: lower global_batch_size or "
        f"image_size{more}, or try --precision=mixed_bfloat16"
    )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"[:2000]
