"""One job, readable from the top: cluster, job directory, devices, data, model, resume, train, export, result."""

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from trainer.build import TrainingSetup, build_setup
from trainer.config.train_config import TrainConfig
from trainer.data.dataset import closed_on_failure, failures_of_reading
from trainer.distribution.cluster import Cluster, read_cluster
from trainer.distribution.meeting import meet
from trainer.distribution.peers import Peers
from trainer.distribution.strategy import Replicas, local_devices, make_replicas
from trainer.errors import DONE, FAULT, INTERRUPTED, USER_MUST_CHANGE, NotFinite, PlatformFault, UserError
from trainer.export import export, load_template_weights
from trainer.log import log
from trainer.models import depends_on_replicas
from trainer.models.layers import refresh_normalization
from trainer.reporting.job_directory import JobDir, open_job_dir
from trainer.reporting.progress import Progress
from trainer.reporting.reporter import Reporter
from trainer.reporting.result import RunResult, refuse_hopeless_restart
from trainer.reporting.run_files import Result, drop_stats_after, last_reported_step
from trainer.reporting.run_info import run_info, versions
from trainer.storage.initial import fetch_checkpoint, fetch_model
from trainer.storage.run_layout import RUN_INFO, SKIPPED_IMAGES
from trainer.training.callbacks import bind, load_callbacks, restore_callbacks, state_of_callbacks
from trainer.training.checkpoint import Checkpoints, load_weights
from trainer.training.evaluation import Evaluation, evaluation
from trainer.training.hooks import Best, make_hooks
from trainer.training.loop import CallSize, Hook, do_due, train
from trainer.training.preemption import Control, Interrupted, StopRequest, stop_on_signals
from trainer.training.state import LearningRates

_MOST_ROLLBACKS = 2


@dataclass
class Job:
    """The parts of one run, put together and ready to train."""

    config: TrainConfig
    job_dir: JobDir
    account: RunResult
    peers: Peers | None
    assembly: TrainingSetup
    callbacks: list[keras.callbacks.Callback]
    rates: LearningRates
    checkpoints: Checkpoints
    progress: Progress
    restored: dict[str, Any]  # the state beside the variables that it goes on from; {} for none
    best: Best
    before_events: dict[str, Any] = field(default_factory=dict)  # the state that a signal in their midst saves

    @property
    def replicas(self) -> Replicas:
        """The devices of the run, of all its workers."""
        return self.assembly.replicas

    @property
    def is_chief(self) -> bool:
        """Whether this worker writes what is kept."""
        return self.replicas.cluster.is_chief

    @property
    def owed(self) -> bool:
        """Whether what is due at the step that it goes on from is still to be done: a signal came first."""
        return self.restored.get("owed") is True

    def state(self, reporter: Reporter, *, owed: bool = False) -> dict[str, Any]:
        """What a checkpoint keeps beside the variables; `owed`: what is due at this step is still to be done."""
        return {
            **self.progress.state(),
            "reporter": reporter.state(),
            "callbacks": state_of_callbacks(self.callbacks),
            "learning_rates": self.rates.state(),
            "best": self.best.state(),
            "owed": owed,
        }

    def save(self, reporter: Reporter, *, owed: bool = False) -> None:
        """A checkpoint of now, or of before what is due and `owed`; result.json then says how far the run is."""
        self.best.improved = False
        self.checkpoints.save(self.progress.step, self.before_events if owed else self.state(reporter))
        self.write_result("running", reporter)

    def write_result(self, state: str, reporter: Reporter) -> None:
        """Replaces result.json, on the chief."""
        if self.is_chief:
            self.account.saving_seconds = self.checkpoints.saving_seconds
            self.job_dir.write_result({**self.account.result(state), **reporter.summary()})


def run(config: TrainConfig, command: Sequence[str], began: float, job_dir: JobDir | None = None) -> int:
    """Runs the job and returns its exit code.

    `began`: time.monotonic() at the start of the process; `job_dir`: the run's own, where it is open already.

    What the user must change is raised as UserError. However a run ends, result.json says so; a run that does not come
    to train leaves the result of a finished one before it alone.
    """
    cluster = read_cluster()
    if cluster.note:
        log.warning(cluster.note)
    job_dir = job_dir or open_job_dir(config, make=cluster.is_chief)
    before: Result = job_dir.read_result() if cluster.is_chief else {}
    account = RunResult.from_previous(config, before, began)
    job_dir.mirror.begin(job_dir.logs)
    with closing(job_dir.mirror), _peers(config, cluster, job_dir, account) as peers:
        refuse_hopeless_restart(config, before)  # here, where the other workers hear of it
        replicas = make_replicas(config, cluster)
        log.info(f"{replicas.sentence()} on {', '.join(replicas.devices)}")
        account.rollbacks = replicas.from_chief(account.rollbacks)
        while True:
            try:
                return _attempt(config, command, replicas, job_dir, account, peers)
            except NotFinite as error:
                if config.on_nan != "rollback" or account.rollbacks >= _MOST_ROLLBACKS:
                    raise
                account.rollbacks += 1
                log.warning(f"{error}; goes back to the last checkpoint with half the learning rate")


@contextmanager
def _peers(config: TrainConfig, cluster: Cluster, job_dir: JobDir, account: RunResult) -> Iterator[Peers | None]:
    """The other workers, while we work with them; they hear how we end. A failure is written to result.json."""

    def write_failure(error: str, code: int) -> None:
        with suppress(UserError):  # where result.json cannot be written either, the first error is the one to tell
            known = job_dir.read_result() if cluster.is_chief else {}
            if cluster.is_chief and known.get("state") != "done":
                job_dir.write_result(account.failure(error, code, known))
        job_dir.mirror.leave()

    peers = None
    try:
        if cluster.several:
            devices = {"devices": len(local_devices(config, cluster))}
            runs = {**versions(), **devices, **dataclasses.asdict(config)}
            peers = meet(cluster, runs, config.worker_timeout_seconds, write_failure)
        yield peers
        if peers:
            peers.finish(config.worker_timeout_seconds)
    except Exception as error:
        code = USER_MUST_CHANGE if isinstance(error, UserError) else FAULT
        if peers and isinstance(error, tf.errors.OpError):
            peers.await_verdict()  # that a worker is lost may be known in a moment, and by its name
        if peers:
            peers.fail(code, _one_line(error))
        write_failure(_one_line(error), code)
        raise


def _attempt(
    config: TrainConfig,
    command: Sequence[str],
    replicas: Replicas,
    job_dir: JobDir,
    account: RunResult,
    peers: Peers | None,
) -> int:
    """The run from its newest checkpoint on; NotFinite where it has to go back to it."""
    job = prepare(config, replicas, job_dir, account, peers)
    with closing(job.assembly.dataset):
        ended = replicas.from_chief(_ended_before(job))
        if ended:
            log.info(ended)
            return DONE
        if job.is_chief:
            _describe(job, command)
        return _train_and_export(job)


def prepare(
    config: TrainConfig, replicas: Replicas, job_dir: JobDir, account: RunResult, peers: Peers | None = None
) -> Job:
    """Callbacks, data, model, and the state to go on from."""
    callbacks = load_callbacks(config)
    assembly = build_setup(_with_lower_rates(config, account.rollbacks), replicas)
    with closed_on_failure(assembly.dataset.close):
        for reason in depends_on_replicas(assembly.model, replicas.count):
            log.warning(f"the result depends on the number of replicas: {reason}")
        checkpoints = Checkpoints(
            assembly.model, replicas, job_dir.checkpoints, config.keep_checkpoints, job_dir.mirror
        )
        count, shape = assembly.dataset.train.count, assembly.dataset.image_shape
        log.info(f"trains {config.model} on {count:,} examples of {config.data}, {'x'.join(map(str, shape))}")
        restored = _initialise(config, assembly, checkpoints)
        schedule = assembly.schedule
        total = schedule.total_steps(config.steps, config.epochs)
        progress = Progress(restored.get("step", 0), total, schedule.steps_per_epoch, schedule.examples_per_step)
        best = Best(config)
        if restored:
            with _understood(checkpoints):
                progress.resume(restored)
                best.resume(restored["best"])
        account.resume(progress, last_reported_step(job_dir.root) if replicas.cluster.is_chief else 0)
        rates = LearningRates(assembly.model)
        return Job(config, job_dir, account, peers, assembly, callbacks, rates, checkpoints, progress, restored, best)


@contextmanager
def _understood(checkpoints: Checkpoints) -> Iterator[None]:
    """UserError where the state beside the variables is not what this version keeps there."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UserError(
            f"{checkpoints.restored}: its state is of another version of this trainer ({error!r}): go on with that "
            "one, or give another --job_dir"
        ) from error


def _with_lower_rates(config: TrainConfig, rollbacks: int) -> TrainConfig:
    scale = 0.5**rollbacks
    return dataclasses.replace(
        config,
        learning_rate=config.learning_rate * scale,
        fine_tune_learning_rate=config.fine_tune_learning_rate * scale,
    )


def _initialise(config: TrainConfig, assembly: TrainingSetup, checkpoints: Checkpoints) -> dict[str, Any]:
    """In this order: this job's newest checkpoint; weights of another run's checkpoint; of a template model; none."""
    restored = checkpoints.restore()
    if restored:
        log.info(f"resumes at step {restored['step']:,} from {checkpoints.restored or 'the chief'}")
    elif config.initial_checkpoint:
        folder = fetch_checkpoint(config.initial_checkpoint, "initial_checkpoint", config.cache_dir)
        load_weights(assembly.model, folder, assembly.replicas)
        log.info(f"starts from the weights in {config.initial_checkpoint}")
    elif config.initial_model:
        file = fetch_model(config.initial_model, "initial_model", config.cache_dir)
        with assembly.replicas.strategy.scope():
            load_template_weights(assembly.model, file)
        log.info(f"starts from the weights of {config.initial_model}")
    else:
        log.info("starts from scratch")
    refresh_normalization(assembly.model)
    return restored


def _ended_before(job: Job) -> str | None:
    """What to say where this run has nothing left to do."""
    result, progress = job.account.before, job.progress
    if not job.is_chief or result.get("steps") != progress.step:
        return None
    if not job.job_dir.mirror.holds(job.job_dir.model):
        return None
    asked, done = progress.asked_steps, progress.step
    if result.get("state") == "done" and progress.finished and progress.total_steps < asked:
        more = "more steps and a larger --patience" if job.config.early_stopping else "more steps"
        return f"finished already: stopped early after {done:,} of {asked:,} steps: give {more} to go on"
    if result.get("state") == "done" and (progress.finished or result.get("asked_steps") == asked):
        return f"finished already: {done:,} steps are done, {asked:,} were asked for: give more to go on"
    minutes = job.config.max_minutes
    if result.get("state") == "budget" and minutes and job.account.wall_seconds_before >= 60 * minutes:
        return f"its budget of {minutes:g} minutes is spent after {done:,} steps: raise --max_minutes to go on"
    return None


def _describe(job: Job, command: Sequence[str]) -> None:
    """Writes run.json, and the list of images that were left out."""
    assembly, dataset = job.assembly, job.assembly.dataset
    about = run_info(job.config, command, job.replicas, assembly.schedule, job.progress.total_steps)
    notes = dict(dataset.notes)
    skipped = notes.pop("skipped", [])
    if skipped:
        job.job_dir.write(SKIPPED_IMAGES, skipped)
    about["data"] |= {"classes": list(dataset.class_names), "skipped": len(skipped), **notes}
    about["depends_on_replicas"] = depends_on_replicas(assembly.model, job.replicas.count)
    job.job_dir.write(RUN_INFO, about)


def _train_and_export(job: Job) -> int:
    progress = job.progress
    if job.is_chief and job.owed:
        drop_stats_after(job.job_dir.root, progress.step - 1)  # as far as it was told, it is told again
    reporter = Reporter(job.config, job.job_dir if job.is_chief else None, progress, lambda: job.checkpoints.latest)
    try:
        job.write_result("running", reporter)
        with failures_of_reading(), stop_on_signals() as stop:
            control = _train(job, reporter, stop)
            interrupted = control.signal is not None
            job.save(reporter, owed=interrupted)
            job.checkpoints.wait()
        if job.is_chief and not interrupted:
            export(job.assembly.model, job.job_dir.model, job.assembly.dataset.image_shape)
            job.job_dir.mirror.put(job.job_dir.model)
    except Exception as error:
        with suppress(Exception):
            job.checkpoints.wait()  # the state of before this error may still be on its way to the disk
        if is_out_of_memory(error):
            raise UserError(_out_of_memory(job.config, job.replicas)) from error
        raise
    finally:
        reporter.close()
    if interrupted:
        job.write_result("interrupted", reporter)
        job.job_dir.mirror.leave()
        log.warning(f"{control.signal}: state saved at step {progress.step:,}; the same command again goes on")
        return INTERRUPTED
    job.job_dir.mirror.finish()  # all is there before result.json says so
    spent = control.budget_spent and not progress.finished
    job.write_result("budget" if spent else "done", reporter)
    job.job_dir.mirror.finish()
    state = f"the budget of {job.config.max_minutes:g} minutes is spent after" if spent else "done:"
    where = f"; the model is in {job.job_dir.mirror.where(job.job_dir.model)}" if job.is_chief else ""
    log.info(f"{state} {progress.step:,} steps{where}")
    return DONE


def _train(job: Job, reporter: Reporter, stop: StopRequest) -> Control:
    config, model, progress, replicas = job.config, job.assembly.model, job.progress, job.replicas
    minutes, most = config.checkpoint_every_minutes, config.max_minutes
    budget = 60 * most - job.account.wall_seconds if most else None
    control = Control(replicas, stop, 60 * minutes if minutes else None, budget)
    evaluate = evaluation(model, control.watched(), job.assembly.dataset.evaluation)
    callbacks = bind(job.callbacks, model, progress, evaluates=evaluate is not None)
    model.stop_training = False
    callbacks.on_train_begin()
    if job.restored:
        with _understood(job.checkpoints):
            reporter.resume(job.restored["reporter"])
            restore_callbacks(job.callbacks, job.restored["callbacks"])
            job.rates.resume(job.restored.get("learning_rates") or job.rates.state())
    callbacks.on_epoch_begin((progress.step - job.owed) // progress.steps_per_epoch)
    events = _events(job, reporter, callbacks, evaluate, control)
    begin = job.peers.begin_call if job.peers else lambda: None
    steps, rows = job.assembly.step_runner(), job.assembly.rows_from(progress.step)
    if job.owed:
        do_due(events, progress, model)
    if not progress.ends:
        log.info("builds the training step: seconds, or minutes for a large model with several replicas")
    train(steps, rows, progress, events, callbacks, reporter.on_call, CallSize(config.steps_per_loop), control, begin)
    callbacks.on_train_end()
    return control


def _events(
    job: Job,
    reporter: Reporter,
    callbacks: keras.callbacks.CallbackList,
    evaluate: Evaluation | None,
    control: Control,
) -> list[Hook]:
    """All events of the run: the first keeps the state that a signal saves, so that who goes on does all the others."""

    def begin(progress: Progress) -> None:
        job.before_events = copy.deepcopy(job.state(reporter, owed=True))
        if control.signal:
            raise Interrupted

    save_asked = lambda: control.save_due or job.best.improved  # noqa: E731
    save = Hook(job.config.checkpoint_every_steps, lambda progress: job.save(reporter), asked=save_asked)
    others = make_hooks(job.assembly, reporter, callbacks, evaluate, job.best, save, job.job_dir.root, control)
    return [Hook(0, begin, asked=lambda: True), *others]


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
    told = isinstance(error, (UserError, PlatformFault))
    return " ".join(str(error).split()) if told else f"{type(error).__name__}: {error}"[:2000]
