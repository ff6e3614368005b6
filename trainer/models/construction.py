"""Builds the model that a run names, and checks that it fits the data. user_code/interface.py has
the contract.

The returned model has built optimizers and metrics and a loss to train on, and its layers draw and
normalise for the global batch. A train_step of the user's own may be written for `fit`: its stock
optimizers are built and prepared too. Whatever can be known to fail raises a UserError of one line.
"""

import re
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from trainer.base.errors import UserError, reason
from trainer.base.log import log
from trainer.base.settings.model_settings import function_of
from trainer.base.settings.train_config import TrainConfig
from trainer.data.dataset import Dataset
from trainer.data.examples import described, with_axes
from trainer.data.image_arrays import checked_labels
from trainer.invariance.gradients import reachable, sum_first
from trainer.invariance.internals import (
    all_layers,
    build_compiled,
    compare_signs_on_device,
    lora_in_float64,
    losses_kept,
    losses_reduced_by,
    skip_zero_gradients,
    wrap,
    wrapped,
)
from trainer.invariance.layers import make_independent
from trainer.invariance.losses import try_losses
from trainer.invariance.step import ASKED, StepContext, in_step
from trainer.user_code.interface import (
    ModelInterface,
    has_class_outputs,
    has_own,
    symbolic_inputs,
)
from trainer.user_code.mistakes import as_user_mistake, load_function, message_of


def adapt_keras() -> None:
    """Changes how Keras and TensorFlow use devices, float64 and gradients in this process.

    A second call changes nothing.
    """
    compare_signs_on_device()
    skip_zero_gradients()
    lora_in_float64()


def build_model(config: TrainConfig, dataset: Dataset) -> keras.Model:
    """Builds the model that a run names, and its optimizers. Call it under the strategy's scope.

    Raises UserError if the model cannot be trained with these settings on these data.
    """
    adapt_keras()
    build = load_function(function_of(config.model), "model", ("config", "dataset"), config)
    model = build(config, dataset)
    if not isinstance(model, keras.Model):
        raise UserError(
            f"model={config.model}: the function returned {type(model).__name__}: it must return a"
            " keras.Model"
        )
    # Weights that the import of the user's file created would be shared with the next model of this
    # process.
    module = sys.modules.get(config.model.partition(":")[0])
    globals_of_file = {id(value): name for name, value in vars(module).items()} if module else {}
    for layer in (model, *all_layers(model)):
        if layer.weights and (name := globals_of_file.get(id(layer))):
            raise UserError(
                f"model={config.model}: {name} is made when its file is imported: make it in the"
                " function, as each replica needs weights of its own"
            )
    prepare_model(model, config, dataset)
    return model


def prepare_model(model: keras.Model, config: TrainConfig, dataset: Dataset) -> None:
    """Builds what `fit` would build, and makes the model independent of replicas.

    Call it under the strategy's scope; a second call changes only what is new, such as another
    optimizer. Raises UserError if the model cannot be trained with these settings on these data.
    """
    _refuse_what_fit_alone_does(model, config)
    inputs = symbolic_inputs(model)
    if any(spec.dtype == tf.string for spec in tf.nest.flatten(dataset.spec[0])):
        if inputs and not any(tensor.dtype == "string" for tensor in inputs):
            raise UserError(
                f"data={config.data}: x holds text, but no input of the model has dtype='string':"
                " turn text into numbers first, numbers in text by .astype('float32'), words by"
                " keras.layers.TextVectorization, which may also be a layer of the model"
            )
        if tf.config.get_visible_devices("GPU"):
            log.warning(
                f"model={config.model}: it turns text into numbers, for which GPUs have no kernel"
                " (RaggedTensorToTensor): they wait in each step; call its TextVectorization in"
                " the data function instead"
            )
    x = dataset.input_spec
    if isinstance(model, keras.Sequential) and not (model.built or tf.nest.is_nested(x)):
        # Without an Input, its first call would fix the number of rows in the saved file.
        with suppress(Exception):  # the first call reports what is wrong
            model.build(tuple(x.shape))
    if not has_own(model, "train_step"):
        _build_compiled(model, config, dataset)
    elif model.compiled and type(model).call is not keras.Model.call:
        # Builds loss and metrics if `call` takes x; that of a GAN may take something else.
        with suppress(Exception):  # the train_step reports what is wrong
            build_compiled(model, dataset.zeros(1))
    make_independent(model, config)
    if has_own(model, "train_step") or has_own(model, "compute_loss"):
        prepare_own_step(model, config, dataset)


def _refuse_what_fit_alone_does(model: keras.Model, config: TrainConfig) -> None:
    """Raises UserError for what only `fit` can do, and logs what is left out."""
    name = f"model={config.model}"
    if (model.compiled and model.run_eagerly) or tf.config.functions_run_eagerly():
        raise UserError(
            f"{name}: it runs eagerly, but steps here are graphs, in which Python code runs once:"
            " drop run_eagerly=True and keep what changes between steps in variables"
        )
    if keras.config.max_epochs() or keras.config.max_steps_per_epoch():
        raise UserError(
            "KERAS_MAX_EPOCHS and KERAS_MAX_STEPS_PER_EPOCH limit `fit` alone: use --epochs or"
            " --steps"
        )
    for kind in ("train", "test", "predict"):
        if has_own(model, f"make_{kind}_function"):
            raise UserError(
                f"{name}: it has a make_{kind}_function of its own, which is not called here: do"
                f" the same in {kind}_step, or in a callback"
            )
    # a script calls its `fit` itself
    calls = ["fit", "evaluate"] if ":" in config.model else ["evaluate"]
    if own := [method for method in calls if has_own(model, method)]:
        log.warning(
            f"{name}: its own {' and '.join(own)} is not called: what it adds to Keras's is"
            " left out"
        )


def _build_compiled(model: keras.Model, config: TrainConfig, dataset: Dataset) -> None:
    """Builds optimizer and metrics of a compiled model, as `fit` does: a step is too late.

    Sets `model.counted_losses`. Raises UserError if the model does not fit the data, or if there is
    no loss.
    """
    if not model.compiled:
        raise UserError(
            f"model={config.model}: it is not compiled and has no train_step of its own: call "
            "model.compile(optimizer, loss=…) before you return it"
        )
    if "sparse" in _loss_name(model) and has_class_outputs(model):
        classes = model.output_shape[-1]
        for examples in filter(None, (dataset.train, dataset.evaluation)):
            # with labels out of range Keras would give NaN, or fail late
            if examples.targets is not None:
                origin = f"data={dataset.name}: the model has {classes} outputs"
                checked_labels(examples.targets, origin, classes)
    if (
        model.loss is not None
        and dataset.train.labelled
        and dataset.evaluation
        and not dataset.evaluation.labelled
    ):
        raise UserError(  # Keras would fail late
            f"data={dataset.name}: the images for training have labels, but those for evaluation"
            " have none: add theirs, or leave these images out and hold back a part by"
            " --evaluation_fraction"
        )
    # The rows of a micro-batch: a model may be built for just that number, as a stateful one is.
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    count = config.rows_per_replica(replicas) // config.micro_batches_on(replicas)
    rows = dataset.zeros(count)
    try:
        build_compiled(model, rows)
    except (ValueError, TypeError) as error:
        if re.search("incompatible with the layer|incompatible shape", str(error)):
            advice = (
                "; --image_size and --channels set the size of images"
                if dataset.holds_images
                else ""
            )
            raise UserError(
                f"model={config.model}: it cannot be called with x of {config.data}, {count} rows, "
                f"{described(dataset.spec[0])} an example: {message_of(error)}{advice}"
            ) from error
        raise as_user_mistake(error) or UserError(
            f"model={config.model}: its loss or metrics do not fit {config.data} ({dataset.shape}):"
            f" {_other_loss(model, dataset) or reason(error)}"
        ) from error
    own_loss = has_own(model, "compute_loss")
    if model.loss is None and not own_loss:  # then only its layers can have added one
        inputs, *_ = keras.utils.unpack_x_y_sample_weight(rows)
        with keras.StatelessScope(collect_losses=True) as scope:
            model(inputs, training=True)
        if not (scope.losses or any(variable.regularizer for variable in model.trainable_weights)):
            raise UserError(
                f"model={config.model}: there is no loss to train on: pass loss=… to its compile(),"
                " or let a layer of it call add_loss"
            )
    if model.optimizer and not own_loss:
        sum_first(model.optimizer)
    if config.micro_batches > 1 or config.virtual_replicas:
        # Whether a loss divides by a count of rows that is known only after a forward pass.
        counted = []

        def reduce(
            original: Any, values: Any, sample_weight: Any, mask: Any, reduction: Any, dtype: Any
        ) -> Any:
            counted.append(mask is not None or reduction == "mean_with_sample_weight")
            return original(values, sample_weight, mask, reduction, dtype)

        with losses_reduced_by(reduce):
            try_losses(model, rows)
        model.counted_losses = any(counted)


def _loss_name(model: keras.Model) -> str:
    """Returns the name of compile()'s loss in lower case, without underscores."""
    loss = model.loss
    name = loss if isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__)
    return name.replace("_", "").lower()


def _other_loss(model: keras.Model, dataset: Dataset) -> str:
    """Returns advice if the loss takes integer labels and these are one-hot, or vice versa."""
    name = _loss_name(model)
    (_, y, *_) = (*dataset.spec, None)
    if not has_class_outputs(model) or not isinstance(y, tf.TensorSpec):
        return ""
    one_hot = tuple(y.shape) == (model.output_shape[-1],)
    if name == "sparsecategoricalcrossentropy" and one_hot:
        return (
            "its loss takes integer labels, and these are one-hot: use"
            ' loss="categorical_crossentropy"'
        )
    if name == "categoricalcrossentropy" and tuple(y.shape) in ((), (1,)):
        return (
            "its loss takes one-hot labels, and these are numbers: use"
            ' loss="sparse_categorical_crossentropy"'
        )
    return ""


def prepare_own_step(model: keras.Model, config: TrainConfig, dataset: Dataset) -> None:
    """Builds the optimizers of a train_step on its variables, with all-reduced gradients.

    Call it for a train_step, or a compute_loss, of the user's own. Does nothing for optimizers of
    `sum_and_build`. Call it under the strategy's scope, where `fit` would build them too. Sets
    `model.means_of_rows`: whether this code, as one written for `fit`, takes means over a replica's
    rows and never calls current_step(). Raises UserError if the train_step fails.
    """
    optimizers = [part for part in reachable(model) if isinstance(part, keras.optimizers.Optimizer)]
    inner = {id(getattr(optimizer, "inner_optimizer", None)) for optimizer in optimizers}
    optimizers = [
        optimizer
        for optimizer in optimizers
        if id(optimizer) not in inner and not hasattr(optimizer.apply, "sums_first")
    ]
    if not optimizers:
        return
    # One step is traced without running it: which variables does each optimizer get, and is
    # current_step called?
    trained: dict[int, list[Any]] = {}
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    rows = config.rows_per_replica(replicas)
    micro_batches = config.micro_batches_on(replicas)
    interface = ModelInterface.of(model)
    if not interface.own_step:  # Keras's runs on the rows of a micro-batch
        rows = rows // micro_batches
        micro_batches = 1
    shape = (interface.batches_per_step, rows) if interface.stacked else (rows,)
    asks_for_step = False

    def record(
        optimizer: Any, original: Any, gradients: Any, variables: Sequence[Any] | None = None
    ) -> None:
        trained.setdefault(
            id(optimizer), list(model.trainable_variables if variables is None else variables)
        )

    def step(*parts: Any) -> None:
        nonlocal asks_for_step
        context = StepContext(
            config.seed,
            tf.constant(0, tf.int64),
            0,
            rows,
            config.global_batch_size,
            micro_batches=micro_batches,
            virtual_replicas=config.virtual_replicas,
        )
        with in_step(context):
            model.train_step(dataset.step_data(parts))
        asks_for_step = asks_for_step or context.uses[ASKED] > 0

    def on_each(*parts: Any) -> None:
        tf.distribute.get_strategy().run(tf.autograph.experimental.do_not_convert(step), args=parts)

    specs = with_axes(dataset.spec, *shape)
    try:
        with ExitStack() as stack:
            for optimizer in optimizers:
                recorded = wrapped(
                    "keras.optimizers.Optimizer.apply", partial(record, optimizer), owner=optimizer
                )
                stack.enter_context(recorded)
            tf.function(on_each, autograph=False).get_concrete_function(*specs)
    except Exception as error:
        raise as_user_mistake(error) or UserError(
            f"model={config.model}: its train_step fails for {rows} rows of {dataset.shape}:"
            f" {message_of(error)}"
        ) from error

    def apply_and_keep_losses(original: Any, *given: Any, **named: Any) -> None:
        # a step may read `model.losses` after it: these are still those of its replica
        with losses_kept(all_layers(model)):
            original(*given, **named)

    for optimizer in optimizers:
        if variables := trained.get(id(optimizer)):
            if not optimizer.built:
                optimizer.build(variables)
            sum_first(optimizer, mean=not asks_for_step)
            wrap("keras.optimizers.Optimizer.apply", apply_and_keep_losses, owner=optimizer)
    model.means_of_rows = not asks_for_step
