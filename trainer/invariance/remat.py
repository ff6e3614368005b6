"""Recomputes activations in the backward pass (`--remat`), so that a step holds those of few layers at a time.

Chen et al. 2016, https://arxiv.org/abs/1604.06174: a network is cut into some sqrt(n) blocks, of which only the inputs
are kept. A block draws the same random numbers both times, and assigns to variables only once, as batch norm to its
averages.
"""

import contextvars
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import keras
import tensorflow as tf

from trainer.base.errors import UserError
from trainer.base.settings.fields import nearest
from trainer.base.settings.train_config import LAYERS, names_in
from trainer.invariance.internals import all_layers, mask_of, set_mask, wrap
from trainer.invariance.step import in_step, running_step


def recompute(model: keras.Model, remat: str) -> None:
    """Makes the blocks of `model`, or the layers that `remat` names, recompute activations in the backward pass.

    Classes, names, weights and numbers stay; `call` is replaced. Raises UserError for an unknown layer, or if the model
    has no block.
    """
    if remat.startswith(LAYERS):
        names, layers = names_in(remat.removeprefix(LAYERS)), [part for part in all_layers(model) if part is not model]
        known = {layer.name for layer in layers}
        if unknown := [name for name in names if name not in known]:
            raise UserError(f"remat={LAYERS}{unknown[0]}: no such layer{nearest(unknown[0], known)}")
        for layer in layers:
            if layer.name in names:  # several may bear one name
                _recompute(layer)
        return
    if not sum(map(_recompute_blocks, [model] if _is_graph(model) else _composite(model))):
        raise UserError(
            f"remat={remat}: {model.name} has no block to recompute: no layer made of others, and no place where a "
            f"single tensor joins two halves: name layers by --remat={LAYERS}NAME,…, or drop --remat"
        )


def _is_graph(layer: Any) -> bool:
    """Returns whether `layer` is a network whose layers Keras itself calls: Functional, or Sequential and built."""
    return bool(getattr(layer, "inputs", None)) and type(layer).call.__module__.startswith("keras.")


def _composite(model: keras.Model) -> list[keras.layers.Layer]:
    """Returns the outermost layers of a model that are made of several others."""
    return [layer for layer in model.layers if len(all_layers(layer)) > 2]


def _recompute_blocks(layer: Any) -> int:
    """Makes each block of a network recompute, or any other layer as a whole; returns how many blocks recompute."""
    if not _is_graph(layer):
        _recompute(layer)
        return 1
    blocks = _blocks(layer)
    if not blocks:
        return sum(map(_recompute_blocks, _composite(layer)))
    for block in blocks[:-1]:  # the backward pass begins with the last one: it would gain nothing
        _recompute(block)

    def call(original: Any, inputs: Any, training: bool | None = None, mask: Any = None, **named: Any) -> Any:
        if running_step() is None or any(part is not None for part in keras.tree.flatten(mask)):
            return original(inputs, training=training, mask=mask, **named)
        (values,) = keras.tree.flatten(inputs)
        for block in blocks:
            values = block.call(values, training=training)
        return values

    wrap("keras.layers.Layer.call", call, owner=layer)
    return len(blocks) - 1


def _blocks(network: Any) -> list[keras.Model]:
    """Cuts a network of n layers into models that run one after another; returns none if there is no place to cut.

    All but the last have at least sqrt(n) layers. Networks with several inputs or outputs, masks, or layers that are
    used twice are left whole.
    """
    operations = network.layers if isinstance(network, keras.Sequential) else network.operations
    layers = [layer for layer in operations if not isinstance(layer, keras.layers.InputLayer)]
    masks = any(getattr(layer, "mask_zero", False) or isinstance(layer, keras.layers.Masking) for layer in layers)
    if masks or len(network.inputs) != 1 or len(network.outputs) != 1:
        return []
    # A cut is possible after a layer whose output is the only tensor that is still used later.
    uses = Counter(id(tensor) for layer in layers for tensor in keras.tree.flatten(layer.input))
    uses_left = {id(network.inputs[0]): uses[id(network.inputs[0])]}  # by tensor
    ends = [0]
    for number, layer in enumerate(layers, start=1):
        for tensor in keras.tree.flatten(layer.input):
            if id(tensor) not in uses_left:  # a layer that is used twice
                return []
            uses_left[id(tensor)] -= 1
        uses_left |= {id(tensor): uses[id(tensor)] for tensor in keras.tree.flatten(layer.output)}
        only_output = [key for key, count in uses_left.items() if count] == [id(layer.output)]
        if only_output and number - ends[-1] >= math.isqrt(len(layers)) and number < len(layers):
            ends.append(number)
    if id(network.outputs[0]) not in uses_left:
        return []
    joints = [network.inputs[0], *(layers[end - 1].output for end in ends[1:]), network.outputs[0]]
    return [keras.Model(begin, end) for begin, end in itertools.pairwise(joints)] if ends[1:] else []


class _Context(keras.layers.Layer):
    """Finds out the `training` of the calls around it, or sets that of the layers that `function` calls.

    Keras passes it on only from layer to layer.
    """

    def __init__(self, **policy: Any) -> None:
        super().__init__(name="recomputed", **policy)
        self.built = self.supports_masking = True
        self.training: bool | None = None

    def call(self, inputs: Any, function: Callable[[], Any] | None = None, training: bool | None = None) -> Any:
        self.training = training
        return function() if function else inputs


def _recompute(layer: keras.layers.Layer) -> None:
    """Makes `layer` keep only inputs and weights in a training step, and recompute the rest in the backward pass."""
    outside, within = _Context(autocast=False), _Context(dtype=layer.dtype_policy, autocast=layer.autocast)

    def call(original: Any, *args: Any, **named: Any) -> Any:
        values = keras.tree.flatten((args, named))
        places = [place for place, value in enumerate(values) if tf.is_tensor(value) and value.dtype.is_floating]
        step = running_step()
        if step is None or tf.executing_eagerly() or not places:
            return original(*args, **named)
        held: dict[int, Any] = {}

        def hold() -> Any:  # reads variables in full precision, or as an outer block holds them
            held.update((id(variable), tf.convert_to_tensor(variable.value)) for variable in layer.variables)
            return values[places[0]]

        # Within a layer of ours Keras resolves `training`, and does not cast variables to 16 bits.
        outside(values[places[0]], function=hold, **{key: value for key, value in named.items() if key == "training"})
        training = outside.training
        trained, uses, forward = layer.trainable_variables, Counter(step.uses), list[Any]()
        others = [variable for variable in layer.variables if id(variable) not in set(map(id, trained))]
        held_values = [held[id(variable)] for variable in others]
        masks = [mask_of(values[place]) for place in places]
        context = contextvars.copy_context()  # so that the backward pass sees what with-blocks around this call set

        def run(tensors: Sequence[Any], weights: Sequence[Any]) -> tuple[Any, keras.StatelessScope]:
            for tensor, mask in zip(tensors, masks, strict=True):
                set_mask(tensor, mask)
            replaced = dict(enumerate(values)) | dict(zip(places, tensors, strict=True))
            given, options = keras.tree.pack_sequence_as((args, named), [*replaced.values()])
            with keras.StatelessScope(collect_losses=True) as scope:
                for pair in zip([*trained, *others], [*weights, *held_values], strict=True):
                    scope.add_update(pair)  # values given to the scope's constructor would be cast to 16 bits
                outputs = within(tensors[0], function=lambda: original(*given, **options), training=training)
            if scope.losses:
                raise _refused(layer, "adds a loss of its activations, which nothing would differentiate")
            pairs = zip(trained, weights, strict=True)
            if any(scope.get_current_value(variable) is not weight for variable, weight in pairs):
                raise _refused(layer, "assigns to weights that are trained")
            return outputs, scope

        def run_again(tensors: Sequence[Any], weights: Sequence[Any]) -> tuple[Any, keras.StatelessScope]:
            with in_step(replace(step, uses=Counter(uses), averaged=[])):
                return run(tensors, weights)

        def block(*inputs: Any) -> tuple[Any, Callable[..., Any]]:
            tensors, weights = inputs[: len(places)], inputs[len(places) :]
            graph = tf.compat.v1.get_default_graph()
            count = len(graph.get_operations())
            forward[:] = run(tensors, weights)
            _refuse_unrepeatable(layer, graph.get_operations()[count:], [*inputs, *held.values()])

            def gradient(*upstream: Any) -> Any:
                # Nothing is recomputed before `upstream` is there: each input gets a 0 added that depends on it, and
                # that no graph optimizer recognises as 0.
                first = tf.reshape(upstream[0], (-1,))[:1]
                zero = tf.math.is_nan(first) & tf.math.is_inf(first)
                tied = [tensor + tf.reshape(tf.cast(zero, tensor.dtype), [1] * len(tensor.shape)) for tensor in tensors]
                with tf.GradientTape() as tape:
                    tape.watch([*tied, *weights])
                    outputs = keras.tree.flatten(context.copy().run(run_again, tied, weights)[0])
                return tape.gradient(outputs, [*tied, *weights], upstream, tf.UnconnectedGradients.ZERO)

            return keras.tree.flatten(forward[0]), gradient

        inputs = [*(values[place] for place in places), *(held[id(variable)] for variable in trained)]
        flat = tf.custom_gradient(block)(*inputs)
        outputs, scope = forward
        # What the forward pass assigned, as batch norm to its averages, is still in its scope.
        for variable, before in zip(others, held_values, strict=True):
            if (value := scope.get_current_value(variable)) is not before:
                variable.assign(value)
        results = tf.nest.flatten(flat)
        for output, result in zip(keras.tree.flatten(outputs), results, strict=True):
            set_mask(result, mask_of(output))
        return keras.tree.pack_sequence_as(outputs, results)

    wrap("keras.layers.Layer.call", call, owner=layer)


def _refuse_unrepeatable(layer: keras.layers.Layer, operations: Sequence[Any], inputs: Sequence[Any]) -> None:
    """Raises UserError if operations of a block draw anew each time, or take a tensor that would get no gradient."""
    names, known = {operation.name for operation in operations}, {tensor.ref() for tensor in inputs}
    for operation in operations:
        if operation.op_def.is_stateful and re.search("Random|Multinomial|TruncatedNormal", operation.type):
            raise _refused(layer, f"draws by {operation.type}, which draws other numbers again (keras.random does not)")
        if tf.distribute.get_replica_context().num_replicas_in_sync > 1:  # all-reduces take tensors of other replicas
            continue
        for tensor in operation.inputs:
            outside = tensor.op.name not in names and tensor.ref() not in known and tensor.op.type != "Const"
            if outside and tensor.dtype.is_floating:
                raise _refused(layer, f"uses {tensor.name}, which is not among its inputs and would get no gradient")


def _refused(layer: keras.layers.Layer, why: str) -> UserError:
    """Returns the error for a layer that cannot be recomputed."""
    return UserError(f"remat: {layer.name} {why}: name other layers by --remat={LAYERS}NAME,…, or drop --remat")
