"""Counts the work of a step in its graph: operations, bytes, and FLOPs, of matrix products and
convolutions alone.

Products are MatMul, Einsum and the like. Padding is included, and a multiplication and an addition
are two. What TensorFlow prunes, or computes once from constants, is not counted.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from trainer.invariance.internals import graph_of_function
from trainer.proof.arithmetic import letters_of

# The dense side and the filter of each convolution: ("out" or "in", number). Each pixel of the
# dense side is multiplied with the whole filter once. A transposed convolution is a
# Conv2DBackpropInput, and its gradient a Conv2D.
_CONVOLUTIONS = {
    "Conv2D": (("out", 0), ("in", 1)),
    "Conv2DBackpropInput": (("in", 2), ("in", 1)),
    "Conv2DBackpropFilter": (("in", 2), ("out", 0)),
    "DepthwiseConv2dNative": (("out", 0), ("in", 1)),
    "DepthwiseConv2dNativeBackpropInput": (("in", 2), ("in", 1)),
    "DepthwiseConv2dNativeBackpropFilter": (("in", 2), ("out", 0)),
    "Conv3D": (("out", 0), ("in", 1)),
    "Conv3DBackpropInputV2": (("in", 2), ("in", 1)),
    "Conv3DBackpropFilterV2": (("in", 2), ("out", 0)),
}
_TRANSPOSED = {
    "MatMul": "transpose_a",
    "BatchMatMul": "adj_x",
    "BatchMatMulV2": "adj_x",
    "BatchMatMulV3": "adj_x",
}
# The loop over steps counts once, and a model's own loops, as an LSTM's, by their own numbers.
ONE_STEP = (1, None, None, None)
# No kernel is started for them.
NO_KERNEL = {
    "Const",
    "Placeholder",
    "ReadVariableOp",
    "Identity",
    "IdentityN",
    "NoOp",
    "Reshape",
    "Squeeze",
    "ExpandDims",
    "StopGradient",
    "PlaceholderWithDefault",
}
# A GPU's kernel for the gradient of batch norm works on one channel a block: few channels leave
# most of the card idle.
FEW_CHANNELS = 64
_COLLECTIVES = ("CollectiveReduce", "NcclAllReduce")


@dataclass(frozen=True)
class Operation:
    """Holds the counts of an operation, over all `times` that it runs.

    `scope` is its name after its callers' names.
    """

    type: str
    scope: str
    times: int  # 0: it is in a loop whose number of iterations is not known
    flops: int = 0
    moved_bytes: int = 0  # read and written
    reduced_bytes: int = 0  # summed over replicas
    few_channels: bool = False  # it is a gradient of batch norm over at most FEW_CHANNELS


def operations(
    graph: Any,
    loops: Sequence[int | None] = (1,),
    rows: int | None = None,
    scope: str = "",
    times: int = 1,
    used: Sequence[int] | None = None,
) -> Iterator[Operation]:
    """Yields the operations that a call of `graph` runs.

    They include those of functions and loops, but not of tf.cond's branches.
    loops: the number of iterations of each nested loop, the outermost first; by default one, of the
        loop over steps; None stands for the most that the graph gives such a loop, and 0 if it
        gives none.
    rows: the size of first axes that the graph leaves unknown, as after layers that draw by row;
        used: the numbers of the outputs that its caller uses, by default all. Raises ValueError if
        loops are nested more deeply than `loops`.
    """
    # Only what outputs and side effects need is counted, as tapes leave unused gradients.
    needed = set()
    outputs = graph.outputs if used is None else [graph.outputs[number] for number in used]
    read = {(tensor.op, tensor.value_index) for tensor in outputs}
    waiting = [*(tensor.op for tensor in outputs), *graph.control_outputs]
    while waiting:
        op = waiting.pop()
        if op not in needed:
            needed.add(op)
            read |= {(tensor.op, tensor.value_index) for tensor in op.inputs}
            waiting.extend([*(tensor.op for tensor in op.inputs), *op.control_inputs])

    # What follows from constants, as the shapes in batch norm over replicas, is not counted:
    # TensorFlow computes it once.
    constant = set()
    for op in graph.get_operations():
        pure = op.inputs and not op.op_def.is_stateful
        known = pure and all(tensor.op in constant for tensor in op.inputs)
        if op.type == "Const" or known:
            constant.add(op)

    # A function counts as its own operations, and a loop as so many times those of its body.
    for op in graph.get_operations():
        if op not in needed or op in constant:
            continue
        name = f"{scope}{op.name}"
        if op.type in ("PartitionedCall", "StatefulPartitionedCall"):
            called = graph_of_function(graph, op.get_attr("f").name)
            used = [number for number in range(len(op.outputs)) if (op, number) in read]
            yield from operations(called, loops, rows, f"{name}/", times, used)
        elif op.type in ("While", "StatelessWhile"):
            if not loops:
                raise ValueError(f"{name} is a loop without a number of iterations")
            body = graph_of_function(graph, op.get_attr("body").name)
            iterations = _most_iterations(op) if loops[0] is None else loops[0]
            yield from operations(body, loops[1:], rows, f"{name}/", times * iterations)
        else:
            written = sum(_tensor_bytes(tensor, rows) for tensor in op.outputs)
            moved = written + sum(_tensor_bytes(tensor, rows) for tensor in op.inputs)
            reduced = written if op.type.startswith(_COLLECTIVES) else 0
            few = False
            if op.type == "FusedBatchNormGradV3":
                few = (op.inputs[2].shape[0] or FEW_CHANNELS + 1) <= FEW_CHANNELS
            flops = times * _flops(op, rows)
            yield Operation(op.type, name, times, flops, times * moved, times * reduced, few)


def flops_of(graph: Any, rows: int) -> int:
    """Returns the FLOPs of one step of `graph`, a loop over steps.

    Returns 0 if the step has loops of its own of which it is not known how often they run.
    """
    try:
        work = [*operations(graph, ONE_STEP, rows)]
    except ValueError:
        return 0
    return sum(op.flops for op in work) if all(op.times for op in work) else 0


def _most_iterations(loop: Any) -> int:
    """Returns the most iterations of a While if they are a constant, as of an RNN, else 0."""
    most = loop.inputs[1]
    if most.op.type == "Max":  # of the lengths of all rows
        most = most.op.inputs[0]
    value = tf.get_static_value(most)
    return 0 if value is None else max(0, int(np.max(value)))


def _flops(op: Any, rows: int | None) -> int:
    """Returns the FLOPs of a matrix product or convolution.

    It is 0 for other operations and for unknown shapes.
    """

    def shape(operand: tuple[str, int]) -> list[int] | None:
        side, number = operand
        return _shape((op.outputs if side == "out" else op.inputs)[number], rows)

    # A convolution multiplies each pixel of its dense side with the whole filter.
    if op.type in _CONVOLUTIONS:
        dense, kernel = map(shape, _CONVOLUTIONS[op.type])
        if dense is None or kernel is None:
            return 0
        count, *pixels = dense
        pixels = pixels[:-1] if op.get_attr("data_format").endswith(b"C") else pixels[1:]
        return 2 * count * math.prod(pixels) * math.prod(kernel)

    # A matrix product has for each of its numbers the length of the axis that is summed.
    if op.type in _TRANSPOSED:
        factor = shape(("in", 0))
        product = shape(("out", 0))
        if factor is None or product is None:
            return 0
        return 2 * math.prod(product) * factor[-2 if op.get_attr(_TRANSPOSED[op.type]) else -1]

    # An Einsum has a product for each combination of its letters.
    if op.type == "Einsum" and len(op.inputs) == 2:
        first = shape(("in", 0))
        second = shape(("in", 1))
        if first is None or second is None:
            return 0
        equation = op.get_attr("equation").decode()
        (of_first, of_second), output = letters_of(equation, (len(first), len(second)))
        sizes: dict[Any, int] = {}
        for letter, size in zip([*of_first, *of_second], [*first, *second], strict=True):
            sizes[letter] = max(size, sizes.get(letter, 1))  # 1: it is broadcast
        # What one input alone has is summed before the products.
        multiplied = {*output} | ({*of_first} & {*of_second})
        return 2 * math.prod(sizes[letter] for letter in multiplied)
    return 0


def _tensor_bytes(tensor: Any, rows: int | None) -> int:
    """Returns the size of a tensor in bytes; 0 if its shape is unknown or it is only a handle."""
    shape = _shape(tensor, rows)
    if shape is None or not tensor.dtype.is_numpy_compatible:
        return 0
    return math.prod(shape) * tensor.dtype.size


def _shape(tensor: Any, rows: int | None) -> list[int] | None:
    """Returns the sizes of all axes, with `rows` for an unknown first one.

    It is None if another one is unknown.
    """
    if tensor.shape.rank is None:
        return None
    sizes = list(tensor.shape)
    if sizes and sizes[0] is None:
        sizes[0] = rows
    return None if None in sizes else sizes
