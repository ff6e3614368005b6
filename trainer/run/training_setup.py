"""Builds the data, schedule and model of a run, for training, checks and benchmarks alike."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer.base.errors import UserError
from trainer.base.limit_watch import ask_gpus
from trainer.base.log import log
from trainer.base.run_files.serving_file import fetch_checkpoint, fetch_model
from trainer.base.settings.accelerators import data_fit_on_gpu
from trainer.base.settings.fields import as_text, recording_reads
from trainer.base.settings.own_settings import is_named
from trainer.base.settings.step_counts import Schedule
from trainer.base.settings.train_config import TrainConfig
from trainer.cluster.strategy import Replicas
from trainer.data.augmentation import StepData, augmentation, weighted_by_class
from trainer.data.batches import batches, copied_ahead, last_batches
from trainer.data.dataset import Dataset
from trainer.data.examples import HEAD_ROWS, InSequence
from trainer.data.fingerprint import content_of
from trainer.data.fit_data import FitBatches
from trainer.data.sources import load_dataset
from trainer.invariance.gradients import copies_of_weights
from trainer.invariance.internals import reset_layer_names, seed_initializers
from trainer.invariance.layers import refresh_normalization
from trainer.models.construction import build_model
from trainer.run.export import load_template_weights
from trainer.training.checkpoint import load_weights
from trainer.training.replica_rows import ReplicaData
from trainer.training.steps import StepRunner
from trainer.user_code.interface import ModelInterface


@dataclass(frozen=True)
class TrainingSetup:
    """Holds the model, its data and their order, and makes what runs its steps."""

    config: TrainConfig
    replicas: Replicas
    dataset: Dataset
    model: keras.Model
    schedule: Schedule
    content: dict[str, Any]  # counts, classes and digests of the data; {} if they are not needed
    used: Collection[str]  # the settings that loading the data and building the model have read
    proves: bool = False  # whether its steps are still to be proved
    # those that are traced already, for a second `fit`
    runners: dict[str, StepRunner] = field(default_factory=dict)

    def rows_from(self, first_step: int, steps_per_program: int = 1) -> Any:
        """Returns the iterator for `step_runner`: this worker's rows of all steps from a first.

        `steps_per_program`: the number of steps in each item, the first of which starts at a
            multiple of it. If the GPU holds all rows, items are row numbers. On GPUs rows are
            copied ahead while earlier steps run, because a copy within a step waits for everything
            that the step has started.
        """
        train = self.dataset.train
        replicas = self.replicas
        if self.undivided:
            assert isinstance(train, FitBatches)
            steps = train.uncut.repeat().skip(first_step).prefetch(4)
            ahead = replicas.on_gpus and replicas.count == 1
            return copied_ahead(steps, replicas) if ahead else iter(steps)
        steps = self.batches_from(first_step - first_step % steps_per_program, steps_per_program)
        return copied_ahead(steps, replicas) if replicas.on_gpus else iter(steps)

    @property
    def undivided(self) -> bool:
        """Returns whether `rows_from` gives whole batches.

        Each replica then takes its rows within the step. This holds for examples without row
        numbers whose last batch is smaller.
        """
        return self.schedule.last > 0 and isinstance(self.dataset.train, InSequence)

    def batches_from(self, first_step: int, steps_per_program: int = 1) -> Any:
        """Returns the tf.data.Dataset of this worker's rows from `first_step` on."""
        train = self.dataset.train
        if isinstance(train, InSequence):
            train = train.anew()
        numbers = steps_per_program > 1 and self.gather is not None
        first = self.schedule.whole_before(first_step)
        return batches(
            train, self.schedule, self.replicas, first, steps_per_program, numbers=numbers
        )

    def last_rows_from(self, first_step: int) -> Any:
        """Returns the iterator for `last_step_runner`.

        It is None if that of `rows_from` gives these rows, too.
        """
        train = self.dataset.train
        if isinstance(train, InSequence):
            return None
        first_pass = first_step // self.schedule.steps_per_pass
        replicas = self.replicas.of_batch(self.schedule.last)
        return iter(last_batches(train, self.schedule, replicas, first_pass))

    def last_step_runner(self) -> StepRunner:
        """Returns the object that runs the step of a smaller last batch, one at a time."""
        replicas = self.replicas.of_batch(self.schedule.last)
        runner = StepRunner(self.model, self._replica_data(replicas), self.config.seed)
        return self.runners.setdefault("last", runner)

    def _replica_data(self, replicas: Replicas) -> ReplicaData:
        interface = ModelInterface.of(self.model)
        augment = augmentation(self.config)
        return ReplicaData(replicas, interface, self.step_data, augment, undivided=self.undivided)

    @property
    def step_data(self) -> StepData:
        """Returns the function from parts of rows to what `fit` passes, with class weights."""
        return weighted_by_class(self.dataset.step_data, self.config.class_weight)

    @cached_property
    def gather(self) -> Callable[[Any], Any] | None:
        """Copies all examples to the GPU and returns a function from row numbers to rows.

        It is None if they do not fit. XLA compiles it, as TensorFlow's own GPU kernels cannot
        gather bytes. int32 is held as int64, because TensorFlow keeps int32 on the host and would
        copy all of it for each program. Text cannot be held on a GPU.
        """
        # The GPU must have room for the rows, and a type for each.
        train = self.dataset.train
        device = self.replicas.devices[0]
        leaves = tf.nest.flatten(train.arrays)
        size = sum(leaf.nbytes for leaf in leaves)
        if any(leaf.dtype.hasobject for leaf in leaves):
            return None
        if not size or not data_fit_on_gpu(size, free_memory(device)):
            return None

        def gather(rows: Any) -> Any:
            return tf.nest.map_structure(
                lambda part, spec: tf.cast(tf.gather(part, rows), spec.dtype), on_gpu, train.spec
            )

        # The constants live outside of any graph, and every program reads them.
        with tf.init_scope(), tf.device(device):
            on_gpu = tf.nest.map_structure(
                lambda leaf: tf.constant(leaf, tf.int64 if leaf.dtype == np.int32 else leaf.dtype),
                train.arrays,
            )
        log.info(f"{device} holds all examples")

        return tf.function(gather, jit_compile=True, autograph=False)

    def step_runner(self, *, compiled: bool = False, steps_per_program: int = 1) -> StepRunner:
        """Returns the object that runs steps of the model on all replicas.

        compiled: whether XLA compiles them, `steps_per_program` steps in one program. Give it the
            rows of `rows_from` with the same `steps_per_program`.
        """
        data = self._replica_data(self.replicas)
        if steps_per_program > 1:
            return StepRunner(
                self.model, data, self.config.seed, compiled, steps_per_program, self.gather
            )
        kind = "compiled" if compiled else "plain"
        runner = StepRunner(self.model, data, self.config.seed, compiled)
        return self.runners.setdefault(kind, runner)


def free_memory(device: str) -> float:
    """Returns the free bytes of the fullest GPU.

    It is 0 if `device` is a CPU, whose memory holds the rows anyway.
    """
    gpus = ask_gpus("memory.free") if device.startswith("GPU") else []
    return 2**20 * min((mib for (mib,) in gpus if mib), default=0.0)


def build_setup(config: TrainConfig, replicas: Replicas) -> TrainingSetup:
    """Loads the data and builds the model with the precision and the seed of `config`.

    Raises UserError for data that draw at random if the settings need the same rows at every
    reading.
    """
    set_precision_and_seed(config)
    config_of_data, used = recording_reads(config)
    dataset = load_dataset(config_of_data)
    if dataset.drawn:
        differ = (
            f"data={config.data}: two readings of its first examples differ, as it draws at random"
        )
        if replicas.count > 1 or config.deterministic or config.virtual_replicas:
            raise UserError(
                f"{differ}: draw by the number of the example or of the batch"
                " (np.random.default_rng(number)), or in the model; only one replica without"
                " --deterministic trains on such data"
            )
        log.warning(
            f"{differ}: the same command gives other numbers each time, and so does a resumed run"
        )
    content = content_of(dataset, rows=is_named(config.data) and not dataset.drawn)
    replicas.refuse_differences(content, "read the same data")
    return setup_with(config, replicas, dataset, content, used)


def setup_with(
    config: TrainConfig,
    replicas: Replicas,
    dataset: Dataset,
    content: Mapping[str, Any] | None = None,
    used: Collection[str] = (),
) -> TrainingSetup:
    """Builds the model and the schedule for a loaded dataset. Call `set_precision_and_seed` before.

    used: the settings that loading the data has read.
    """
    config_of_model, used_by_model = recording_reads(config)
    with replicas.strategy.scope():
        model = build_model(config_of_model, dataset)
    refuse_other_classes(config, dataset, model)
    per_step = ModelInterface.of(model).batches_per_step
    schedule = Schedule(dataset.train.count, config.global_batch_size, per_step, config.seed)
    return TrainingSetup(
        config, replicas, dataset, model, schedule, dict(content or {}), {*used, *used_by_model}
    )


def refuse_other_classes(config: TrainConfig, dataset: Dataset, model: keras.Model) -> None:
    """Raises UserError for weights of missing classes, and for targets that are no classes."""
    if config.class_weight and len(parts := dataset.train.first(HEAD_ROWS)) > 1:
        shape = getattr(model, "output_shape", None)
        units = shape[-1] if isinstance(shape, tuple) and len(shape) == 2 else 0
        classes = len(dataset.class_names) or (units and max(2, units))  # 0: it is not known
        largest = max(config.class_weight)
        if largest >= classes > 0:
            raise UserError(
                f"class_weight={as_text(config.class_weight)}: there is no class {largest}: there"
                f" are {classes}, from 0 on"
            )
        y = parts[1]
        if not tf.nest.is_nested(y) and y.dtype.kind == "f" and np.any(y != np.round(y)):
            raise UserError(
                "class_weight: the targets are not one class each: use sample weights instead"
            )


def set_precision_and_seed(config: TrainConfig) -> None:
    """Sets precision and seeds for new layers, and numbers their names from the start."""
    reset_layer_names()
    set_arithmetic(config)
    set_precision(config)
    keras.utils.set_random_seed(config.seed)
    seed_initializers(config.seed)


def set_precision(config: TrainConfig) -> None:
    """Sets the precision of new layers, and floatx."""
    keras.config.set_floatx("float64" if config.precision == "float64" else "float32")
    keras.config.set_dtype_policy(config.precision)


def set_arithmetic(config: TrainConfig) -> None:
    """Sets how this process computes, by `config.deterministic` and `config.tf32` among others.

    https://www.tensorflow.org/api_docs/python/tf/config/experimental/enable_op_determinism
    https://www.tensorflow.org/api_docs/python/tf/config/experimental/enable_tensor_float_32_execution
    """
    # Grappler would add the gradients of several shards in an order of its own, and fuse swish in
    # some graphs only.
    rewrites = not config.virtual_replicas
    tf.config.optimizer.set_experimental_options(
        {"arithmetic_optimization": rewrites, "remapping": rewrites}
    )
    tf.config.experimental.enable_tensor_float_32_execution(config.tf32)
    if config.deterministic:
        tf.config.experimental.enable_op_determinism()


def starting_weights(config: TrainConfig, setup: TrainingSetup) -> None:
    """Loads the first weights, if a setting names some, and logs where the run starts."""
    initial = config.initial_checkpoint or config.initial_model
    copies = copies_of_weights(setup.model) if initial else []
    if config.initial_checkpoint:
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
    with setup.replicas.strategy.scope():
        for copy, weight in copies:
            copy.assign(weight)
    refresh_normalization(setup.model)
