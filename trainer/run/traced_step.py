"""Traces the step of one replica of several, twice: with some number of rows, and with twice as
many.

The global batch is the same both times, so that one trace stands for four replicas and the other
for two. Each builds a model of its own, in one thread, on this machine's CPU: what a model computes
from the number of replicas while it is built counts too. Nothing of the step runs.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import keras
import tensorflow as tf

from trainer.base.settings.model_settings import function_of
from trainer.base.settings.step_counts import Schedule
from trainer.base.settings.train_config import TrainConfig
from trainer.cluster.strategy import Replicas
from trainer.data.batches import ReplicaRows
from trainer.data.dataset import Dataset
from trainer.data.examples import with_axes
from trainer.invariance.gradients import with_tables_as_of
from trainer.invariance.internals import all_layers, wrapped
from trainer.invariance.step import StepContext
from trainer.proof.walk import BY_ROW, DRAWN, NUMBER, SUMMED
from trainer.run.training_setup import TrainingSetup, set_precision_and_seed, setup_with
from trainer.user_code.interface import ModelInterface
from trainer.user_code.mistakes import load_function

# The rows of a trace: a multiple of the four numbers that a counter draws at once, and so many that
# TensorFlow makes no constant of ones for them (it does up to 1,000 values).
ROWS = 1004
REPLICAS = 4
BUILT_ROWS = 8  # for which a model is built: some data are made for these


class OneOfSeveral(tf.distribute.OneDeviceStrategy):
    """Runs one replica on this machine's CPU and says that there are `count`."""

    def __init__(self, count: int) -> None:
        super().__init__("CPU:0")
        self._count = count
        # the places in the graph of the operations of each micro-batch
        self.micro_batches: list[range] = []

    @property
    def num_replicas_in_sync(self) -> int:
        """Returns how many replicas the one stands for."""
        return self._count

    def run(
        self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None, options: Any = None
    ) -> Any:
        """Returns what `fn` returns in the context of the one replica."""
        with TracedReplica(self, 0):
            return tf.autograph.experimental.do_not_convert(fn)(*args, **(kwargs or {}))


class TracedReplica(tf.distribute.ReplicaContext):
    """Marks in the graph what depends on the other replicas."""

    traced = True

    @property
    def replica_id_in_sync_group(self) -> Any:
        """Returns a tensor that stands for the number of this replica."""
        # Not a constant, so that nobody can compute with the number 0 while the step is traced.
        return tf.identity(tf.raw_ops.PlaceholderWithDefault(input=0, shape=()), name=NUMBER)

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        """Returns tensors that stand for the sums, or means, over replicas.

        Their gradients do the same.
        """
        mean = reduce_op in (tf.distribute.ReduceOp.MEAN, "MEAN", "mean")

        # The name marks a sum in the graph, and the gradient of a sum is marked as one too.
        def marked(tensor: Any) -> tuple[Any, Any]:
            summed = tf.identity(tensor, name=SUMMED)
            result = summed / self.num_replicas_in_sync if mean else summed
            return result, tf.custom_gradient(marked)

        return tf.nest.map_structure(
            lambda part: tf.custom_gradient(marked)(tf.convert_to_tensor(part)), value
        )


@dataclass(frozen=True)
class TracedStep(StepContext):
    """Is the context of the step, which marks draws and notes operations.

    They are the draws by row and the operations of each micro-batch.
    """

    def draw(self, draw: Any, shape: Sequence[Any], stream: str) -> Any:
        """Returns the numbers of `StepContext.draw`, marked."""
        return tf.identity(super().draw(draw, shape, stream), name=DRAWN)

    def accumulate(self, function: Callable[..., Any], *rows: Any) -> Any:
        """Returns what `function` returns for all rows, which stand for a micro-batch's."""
        graph = tf.compat.v1.get_default_graph()
        first = len(graph.get_operations())
        result = super().accumulate(function, *rows)
        tf.distribute.get_strategy().micro_batches.append(range(first, len(graph.get_operations())))
        return result


@dataclass(frozen=True)
class StepTrace:
    """Holds the graph of one trace."""

    graph: Any
    rows: int
    model: keras.Model
    micro_batches: list[range]  # the places of the operations that each micro-batch has


def trace(
    config: TrainConfig, dataset: Dataset, count: int, parts: int, model: keras.Model | None = None
) -> StepTrace:
    """Traces the step of one of `count` parts of a global batch of parts * ROWS rows.

    dataset: as the run has it; model: one with plain variables, if it is not to be built anew.
        Raises UserError, or whatever the user's code raises for such a number of rows.
    """
    # The settings are those of one device that trains on all rows.
    size = parts * ROWS
    config = replace(
        config,
        global_batch_size=parts * BUILT_ROWS,
        replicas=count,
        strategy="auto",
        jit_compile="false",
        micro_batches=1,
        virtual_replicas=0,
        sync_batch_norm=True,
    )

    # Builds the model and its step on the strategy that stands for `count` replicas.
    rows = size // count
    strategy = OneOfSeveral(count)
    replicas = Replicas(strategy, ("CPU:0",) * count, rows, size)
    if model:
        setup = TrainingSetup(
            config, replicas, dataset, model, Schedule(size, size, 1, config.seed), {}, ()
        )
    else:
        # A module may draw when it is first imported, and so must not after the seed is set.
        load_function(function_of(config.model), "model")
        set_precision_and_seed(config)
        setup = setup_with(config, replicas, dataset)

    # Traces the step for the shapes of its rows; building the model has traced micro-batches too.
    interface = ModelInterface.of(setup.model)
    runner = setup.step_runner()
    runner.context = TracedStep
    specs = with_axes(dataset.train.spec, 1, interface.batches_per_step, rows)

    # Keras's layer that splits texts has operations without a rule, but treats each row by itself;
    # a function of the user's in it, or a class of the user's, may not.
    def splits_by_row(layer: keras.layers.Layer) -> bool:
        if type(layer) is not keras.layers.TextVectorization:
            return False
        config = layer.get_config()
        return not (callable(config["standardize"]) or callable(config["split"]))

    def by_row(original: Any, texts: Any) -> Any:
        outputs = original(texts)
        if not tf.is_tensor(outputs) or None in outputs.shape[1:]:  # as long as the longest text
            return outputs
        outputs.set_shape([texts.shape[0], *outputs.shape[1:]])
        return tf.identity_n([outputs, texts], name=BY_ROW)[0]

    def one_step(parts: Any, step: Any) -> Any:
        return runner.one_step(ReplicaRows(parts), step)

    strategy.micro_batches.clear()
    with ExitStack() as stack:
        stack.enter_context(with_tables_as_of(math.inf))
        for layer in all_layers(setup.model):
            if splits_by_row(layer):
                stack.enter_context(wrapped("keras.layers.Layer.call", by_row, owner=layer))
        function = tf.function(one_step, autograph=False).get_concrete_function(
            specs, tf.TensorSpec((), tf.int64)
        )
    return StepTrace(function.graph, rows, setup.model, strategy.micro_batches)
