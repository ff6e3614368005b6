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
from trainer.models import build_model
from trainer.progress import Progress
from trainer.record import describe, ended, failed
from trainer.reporting.reporter import Reporter
from trainer.storage import write_whole
from trainer.training.callbacks import load_callbacks
from trainer.training.checkpoint import Checkpoints
from trainer.training.evaluate import evaluation
from trainer.training.fid import Extractor, Fid
from trainer.training.loop import CallSize, Event, train
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
    checkpoints: Checkpoints
    progress: Progress


def run(config: TrainConfig, command: Sequence[str], began: float) -> int:
    """Runs the job and returns its exit code. `began`: time.monotonic() at the start of the process.

    What the user must change is raised as UserError, and kept in result.json.
    """
    job_dir = open_job_dir(config)
    try:
        job = prepare(config, job_dir)
        _describe(job, command)
        if job.progress.finished and job_dir.read_result().get("state") == "done":
            log.info(f"finished already at step {job.progress.step:,}: give more --steps or --epochs to go on")
            return DONE
        return _train_and_export(job, began)
    except (tf.errors.OpError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise _failed(job_dir, began, _out_of_memory(config)) from error
    except UserError as error:
        raise _failed(job_dir, began, str(error)) from error


def _describe(job: Job, command: Sequence[str]) -> None:
    """Writes run.json, and the list of images that were left out."""
    about = describe(job.config, command, job.replicas, job.schedule, job.progress.total_steps)
    notes = dict(job.dataset.notes)
    skipped = notes.pop("skipped", [])
    if skipped:
        write_whole(job.job_dir.root / "skipped_images.txt", "\n".join(skipped) + "\n")
    about["data"] |= {"classes": list(job.dataset.class_names), "skipped": len(skipped), **notes}
    write_json(job.job_dir.run_file, about)


def prepare(config: TrainConfig, job_dir: JobDir) -> Job:
    """Devices, data, model, and the state to go on from."""
    set_precision(config)
    replicas = make_replicas(config)
    log.info(f"{replicas.sentence()} on {', '.join(replicas.devices)}")
    dataset = load_dataset(config)
    with replicas.strategy.scope():
        model = build_model(config, dataset)
    schedule = Schedule(
        dataset.train.count, config.global_batch_size, getattr(model, "batches_per_step", 1), config.seed
    )
    checkpoints = Checkpoints(model, job_dir.checkpoints, config.keep_checkpoints)
    total = schedule.total_steps(config.steps, config.epochs)
    step = checkpoints.restore()
    log.info(f"resumes at step {step:,} from {checkpoints.latest}" if step else "starts from scratch")
    progress = Progress(step, total, schedule.steps_per_epoch, schedule.examples_per_step)
    return Job(config, job_dir, replicas, dataset, schedule, model, checkpoints, progress)


def set_precision(config: TrainConfig) -> None:
    """Sets the arithmetic of every layer made from here on, and the seed of its first weights."""
    keras.config.set_floatx("float64" if config.precision == "float64" else "float32")
    keras.config.set_dtype_policy(config.precision)
    keras.utils.set_random_seed(config.seed)


def _train_and_export(job: Job, began: float) -> int:
    reporter = Reporter(job.config, job.job_dir, job.progress, lambda: job.checkpoints.latest)
    try:
        _train(job, reporter)
    except KeyboardInterrupt:
        job.checkpoints.save(job.progress.step)
        job.job_dir.write_result({**ended("interrupted", job.progress, began), **reporter.summary()})
        log.warning(f"interrupted: state saved at step {job.progress.step:,}; the same command again goes on")
        return INTERRUPTED
    finally:
        reporter.close()
    export(job.model, job.job_dir.model)
    job.job_dir.write_result({**ended("done", job.progress, began), **reporter.summary()})
    log.info(f"done: {job.progress.step:,} steps; the model is in {job.job_dir.model}")
    return DONE


def _train(job: Job, reporter: Reporter) -> None:
    config, model, progress, replicas = job.config, job.model, job.progress, job.replicas
    epochs = -(-progress.total_steps // progress.steps_per_epoch)
    callbacks = load_callbacks(config, model, epochs, progress.steps_per_epoch)
    rows = batches(
        job.dataset.train, job.schedule,
        first_step=progress.step, first_row=0, rows=replicas.rows, replicas=replicas.count,
    )  # fmt: skip
    model.stop_training = False
    callbacks.on_train_begin()
    callbacks.on_epoch_begin(int(progress.epoch))
    run_steps = StepRunner(model, replicas, config.seed, augmentation(config))
    events = _events(job, reporter, callbacks)
    train(run_steps, iter(rows), progress, events, callbacks, reporter.on_call, CallSize(config.steps_per_loop))
    callbacks.on_train_end()


def _events(job: Job, reporter: Reporter, callbacks: keras.callbacks.CallbackList) -> list[Event]:
    """What happens between calls to the device, in this order."""

    evaluate = evaluation(job.model, job.replicas, job.dataset.evaluation)

    def end_epoch(progress: Progress) -> None:
        means = reporter.epoch_end(progress)
        callbacks.on_epoch_end(int(progress.epoch) - 1, means)
        if not progress.finished:
            callbacks.on_epoch_begin(int(progress.epoch))

    events = [Event(job.config.report_every_steps, reporter.report)]
    if evaluate:
        events.append(Event(job.schedule.steps_per_epoch, lambda progress: reporter.evaluated(progress, evaluate())))
    events += [
        Event(job.schedule.steps_per_epoch, end_epoch, at_end=False),
        Event(job.config.checkpoint_every_steps, lambda progress: job.checkpoints.save(progress.step)),
    ]
    if job.config.fid_every_steps:
        events.append(Event(job.config.fid_every_steps, _fid(job, reporter)))
    if hasattr(job.model, "sample"):
        events.append(Event(job.config.sample_every_steps, lambda progress: reporter.sample(job.model, progress)))
    return events


def _fid(job: Job, reporter: Reporter) -> Callable[[Progress], None]:
    config = job.config
    if not isinstance(getattr(job.model, "latent_dim", None), int):
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
    return any(sign in str(error) for sign in ("OOM when allocating", "RESOURCE_EXHAUSTED", "OUT_OF_MEMORY"))


def _out_of_memory(config: TrainConfig) -> str:
    rows = f" ({config.rows_per_replica(config.replicas)} rows a replica)" if config.replicas else ""
    return (
        f"out of memory with global_batch_size={config.global_batch_size}{rows}, image_size={config.image_size}: "
        "lower one of them, use --precision=mixed_bfloat16, or more replicas"
    )


def _failed(job_dir: JobDir, began: float, error: str) -> UserError:
    """Keeps the failure in result.json, unless a finished run's result stands there."""
    if job_dir.read_result().get("state") != "done":
        job_dir.write_result(failed(error, began))
    return UserError(error)
