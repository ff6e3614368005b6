"""Rules of operations that move values to other places: shapes, slices, joins, places by number,
lists.

A rule returns a Label, or Axes, by which `arithmetic.py` labels the output: a letter for each axis
of an input and of the output, as in einsum; None is an axis whose rows are mixed.
"""

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from trainer.proof.arithmetic import ALL, DIVIDED, broadcast, label_by_letters, rule
from trainer.proof.labels import (
    BY_PLACE,
    INDEX,
    ROWS,
    SAME,
    UNIFORM,
    UNKNOWN,
    ZERO,
    Label,
    Mixes,
    NoRule,
    Shape,
    joined,
    scaled_axes,
)
from trainer.proof.node import PAIRS, Axes, Node, Values

_PLACES = "takes some rows of one replica by their places"
_OTHERS = "puts other values among the rows of one replica"
_LONG = 1 << 16  # stands for a size that is unknown


@rule("Reshape")
def reshaped(node: Node) -> Label:
    """Keeps the order of all values: the axis of rows may join or leave its neighbours."""
    if not node.label(0).has_rows:
        node.setting(1)
        return node.label(0)
    pairs = [*zip(node.shapes[0], node.values(1), strict=True)]
    keeps_rows = all(shape and shape[:1] == (*target[:1],) for shape, target in pairs)
    if node.label(0).axis == 0 and keeps_rows:
        return node.label(0)

    # One axis of the new shape must follow from the rows.
    label = node.whole()
    uniform = node.label(0).kind == UNIFORM
    sizes = [_resolved(*pair) for pair in pairs]
    scaled = scaled_axes((sizes[0], sizes[1]))
    if len(scaled) != 1:
        raise Mixes("cuts the rows of one replica by their number")
    (axis,) = scaled
    outer = math.prod(sizes[0][:axis])
    after = math.prod(sizes[0][axis + 1 :])

    # The values before and after the rows must be as many. What is uniform is in any order.
    layouts = [(label.blocks, label.inner), (label.inner, label.blocks)]
    for layout in layouts if uniform else layouts[:1]:
        before = math.prod(node.shape(0)[: label.axis]) * layout[0]
        blocks, rest = divmod(before, outer)
        inner = sizes[0][axis] // (node.rows[0] * max(blocks, 1))
        behind = math.prod(node.shape(0)[label.axis + 1 :]) * layout[1]
        if not rest and inner * after == behind:
            if uniform and (blocks, inner) == layout:
                return node.label(0)._replace(axis=axis)
            return label._replace(axis=axis, blocks=blocks, inner=inner)
    raise Mixes("joins several rows of one replica")


def _resolved(shape: Shape | None, target: Any) -> Shape:
    """Returns the sizes that a reshape asks for, without -1."""
    if shape is None or None in shape:
        raise NoRule("a shape is unknown")
    rest = math.prod(shape) // max(1, math.prod(int(size) for size in target if size >= 0))
    return tuple(rest if size < 0 else int(size) for size in target)


@rule("Transpose", terms=ALL)
def transposed(node: Node) -> Axes:
    """Moves axes."""
    return Axes({0: range(node.rank(0))}, [int(axis) for axis in node.value(1)])


def _with_new(letters: Sequence[Any], axis: int) -> Axes:
    """Returns the letters of an operation that adds an axis."""
    place = axis % (len(letters) + 1)
    return Axes({0: letters}, [*letters[:place], None, *letters[place:]])


@rule("ExpandDims", terms=ALL)
def with_new_axis(node: Node) -> Axes:
    """Adds an axis."""
    return _with_new(range(node.rank(0)), int(node.value(1)))


@rule("OneHot")
def one_hot(node: Node) -> Axes:
    """Adds an axis of so many classes."""
    return _with_new(range(node.rank(0)), node.attribute("axis"))


@rule("Squeeze", terms=ALL)
def squeezed(node: Node) -> Axes:
    """Drops axes of the length 1; one of rows is longer, as the traces have several."""
    sizes = node.shape(0)
    gone = {axis % len(sizes) for axis in node.attribute("squeeze_dims")}
    gone = gone or {axis for axis, size in enumerate(sizes) if size == 1}
    return Axes({0: range(len(sizes))}, [axis for axis in range(len(sizes)) if axis not in gone])


@rule("Fill")
def filled(node: Node) -> Label:
    """Repeats one value."""
    node.read.add(0)
    return node.label(1) if node.label(1).kind == ZERO else _repeated(node.label(1), node.values(0))


@rule("BroadcastTo", terms=ALL)
def broadcasted(node: Node) -> Axes | Label:
    """Repeats values along axes of the length 1, and new ones."""
    rank = len(node.values(1)[0])
    if not node.label(0).has_rows:
        return _repeated(node.label(0), node.values(1))
    return Axes({0: range(-node.rank(0), 0)}, range(-rank, 0))


def _repeated(label: Label, sizes: Values) -> Label:
    """Returns the label of values without rows that are repeated to these sizes."""
    scaled = scaled_axes(sizes)
    if label.kind == ZERO or not scaled:
        return label
    if label.kind != SAME:
        raise Mixes("gives a sum over the rows of one replica to each row")
    if len(scaled) > 1:
        raise Mixes(PAIRS)
    return label._replace(kind=UNIFORM, axis=scaled[0])


@rule("Tile")
def tiled(node: Node) -> Label:
    """Repeats all values along axes."""
    label = node.label(0)
    counts = node.values(1)
    scaled = scaled_axes(counts)
    if label.has_rows and scaled:
        raise Mixes(PAIRS)
    if label.has_rows:
        return node.whole()._replace(blocks=node.whole().blocks * int(counts[0][label.axis]))
    if scaled and node.shape(0)[scaled[0]] != 1:
        raise NoRule("repeats several values once for each row")
    return _repeated(label, counts)


@rule("Pack", terms=ALL)
def stacked(node: Node) -> Axes | Label:
    """Adds an axis along which the inputs lie."""
    letters = range(node.rank(0))
    axes = _with_new(letters, node.attribute("axis"))
    axes = axes._replace(inputs=dict.fromkeys(range(len(node.labels)), letters))
    return _index(node, axes) if axes.output[-1] is None else axes


def _index(node: Node, axes: Axes) -> Axes | Label:
    """Returns the label of what lies along a last axis, if it begins with the number of the row."""
    first, *others = [node.label(number) for number in axes.inputs]
    if not any(label.places for label in (first, *others)):
        return axes
    if not first.is_number or any(label.places for label in others):
        raise Mixes(BY_PLACE)
    return label_by_letters(node, axes, ALL)._replace(places=INDEX)


@rule("Unpack", terms=ALL, why=_PLACES)
def unstacked(node: Node) -> Axes:
    """Takes each place of an axis by itself."""
    letters = [*range(node.rank(0))]
    del letters[node.attribute("axis")]
    return Axes({0: range(node.rank(0))}, letters)


@rule("ConcatV2", terms=ALL)
def concatenated(node: Node) -> Axes | Label:
    """Lays batches one after another, or their features side by side."""
    numbers = range(len(node.labels) - 1)
    letters = range(node.rank(0))
    axis = letters[int(node.value(len(numbers)))]
    labels = [node.settled(number) for number in numbers]
    if not any(label.has_rows and label.axis == axis for label in labels):
        axes = Axes(dict.fromkeys(numbers, letters), letters)
        return _index(node, axes) if axis == letters[-1] and node.shape(0)[-1] == 1 else axes
    powers = {label.power for label in node.labels[:-1] if label.kind != ZERO}
    if len(powers) > 1:
        raise Mixes(DIVIDED)

    # Batches may follow one another if each has its rows in the same order.
    whole = [node.whole(number) for number in numbers]
    inner = next((label.inner for label in labels if label.kind == ROWS), 1)
    blocks = 0
    for label, before in zip(whole, labels, strict=True):
        if label.kind != ROWS:
            raise Mixes(_OTHERS)
        repeats = label.blocks * label.inner
        if (before.kind == ROWS and label.inner != inner) or repeats % inner:
            raise NoRule("joins rows in different orders")
        blocks += repeats // inner
    return Label(ROWS, axis, blocks, inner, powers.pop()) if powers else Label(ZERO)


def _places(shape: Shape | None, axis: int, index: Any) -> tuple[int, Any]:
    """Returns where the axis of rows is after x[index], and which of its places remain."""
    if shape is None or shape[axis] is None:
        raise NoRule("a number of rows is unknown")
    sizes = [_LONG if size is None else size for size in shape]
    numbers = np.arange(sizes[axis]).reshape(-1, *[1] * (len(sizes) - axis - 1))
    remaining = np.broadcast_to(numbers, sizes)[index]  # only the axis of the numbers has strides
    axis_of_rows = next((place for place, stride in enumerate(remaining.strides) if stride), None)
    if axis_of_rows is None or not remaining.size:
        raise Mixes(_PLACES)
    line: list[Any] = [0] * remaining.ndim
    line[axis_of_rows] = slice(None)
    return axis_of_rows, remaining[tuple(line)]


def _taken(node: Node, indexes: Sequence[Any]) -> Label:
    """Returns the label of x[index], which has rows, by the index in each trace.

    An index that cuts the axis of rows must take whole batches.
    """
    label = node.label(0)
    pairs = zip(node.shapes[0], indexes, strict=True)
    (axis, first), (_, second) = (_places(shape, label.axis, index) for shape, index in pairs)
    lengths = [shape[label.axis] for shape in node.shapes[0] if shape]
    if [len(first), len(second)] != lengths or first[0]:
        label = _batches(node.whole(), (first, second), node.rows)
    return label._replace(axis=axis)


def _batches(label: Label, places_of: Sequence[Any], rows: tuple[int, int]) -> Label:
    """Returns the label of the batches that remain, by their places in each trace."""
    ends = set()
    for places, count in zip(places_of, rows, strict=True):
        if not np.array_equal(places, np.arange(places[0], places[0] + len(places))):
            raise Mixes("takes every other row of one replica, or turns their order round")
        ends.add((places[0] / (count * label.inner), len(places) / (count * label.inner)))
    first, blocks = ends.pop()
    if ends or first != int(first) or blocks != int(blocks):
        raise Mixes(_PLACES)
    return label._replace(blocks=int(blocks))


@rule("Split SplitV")
def split(node: Node) -> list[Label]:
    """Cuts an axis into parts: that of rows between batches only."""
    equal = node.type == "Split"
    number = int(equal)
    count = len(node.operations[0].outputs)
    label = node.label(number)
    axis = int(node.value(0 if equal else 2)) % node.rank(number)
    if not equal:
        node.setting(1)
    if not label.has_rows or label.axis != axis:
        return [label] * count
    parts = []
    for trace in (0, 1):
        length = (node.shapes[number][trace] or ())[axis]
        sizes = [length // count] * count if equal else node.values(1)[trace]
        parts.append(np.split(np.arange(length), np.cumsum(sizes)[:-1]))
    pairs = zip(*parts, strict=True)
    return [_batches(node.whole(number), places_of, node.rows) for places_of in pairs]


@rule("Slice")
def part(node: Node) -> Label:
    """Takes a part of each axis."""
    if not node.label(0).has_rows:
        node.setting(1, 2)
        return node.label(0)
    indexes = []
    for begins, sizes in zip(node.values(1), node.values(2), strict=True):
        index = []
        for begin, size in zip(begins, sizes, strict=True):
            index.append(slice(begin, None if size < 0 else begin + size))
        indexes.append(tuple(index))
    return _taken(node, indexes)


def _strided(node: Node) -> list[Any]:
    """Returns the index of a strided slice, whose places are its inputs 1 to 3, in each trace."""
    names = ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask")
    begin, end, ellipsis, new, shrink = (node.attribute(name) for name in names)
    indexes = []
    for trace in (0, 1):
        index: list[Any] = []
        places = zip(*(node.values(number)[trace] for number in (1, 2, 3)), strict=True)
        for place, (start, stop, stride) in enumerate(places):
            bit = 1 << place
            if ellipsis & bit:
                index.append(Ellipsis)
            elif new & bit:
                index.append(np.newaxis)
            elif shrink & bit:
                index.append(start)
            else:
                first = None if begin & bit else start
                index.append(slice(first, None if end & bit else stop, stride))
        indexes.append(tuple(index))
    return indexes


@rule("StridedSlice")
def strided(node: Node) -> Label:
    """Takes a part of each axis by numbers and masks."""
    node.setting(1, 2, 3)
    return _taken(node, _strided(node)) if node.label(0).has_rows else node.label(0)


@rule("StridedSliceGrad")
def strided_gradient(node: Node) -> Label:
    """Puts values into zeros, where a strided slice took them from."""
    if not node.label(4).has_rows:
        node.setting(0, 1, 2, 3)
        return node.label(4)
    label = node.whole(4)
    indexes = _strided(node)
    shapes = [tuple(map(int, shape)) for shape in node.values(0)]
    for axis in range(len(shapes[0])):
        with suppress(Mixes):  # an index takes this axis away
            place, first = _places(shapes[0], axis, indexes[0])
            _, second = _places(shapes[1], axis, indexes[1])
            if place == label.axis:
                break
    else:
        raise NoRule("adds an axis")
    blocks, rest = divmod(shapes[0][axis], node.rows[0] * label.inner)
    if rest:
        raise Mixes(_PLACES)
    _batches(label, (first, second), node.rows)
    return label._replace(axis=axis, blocks=blocks)


@rule("Pad PadV2 MirrorPad MirrorPadGrad", terms=(0,), why=_OTHERS)
def padded(node: Node) -> Axes | Label:
    """Adds values around others: along rows only whole batches of zeros."""
    label = node.settled(0)
    pads = node.values(1)
    is_padded = [np.any([pad[axis] for pad in pads]) for axis in range(node.rank(0))]
    letters = [None if padded else axis for axis, padded in enumerate(is_padded)]
    if node.type == "PadV2" and node.label(2).kind != ZERO:
        return label_by_letters(node, Axes({0: letters}, letters), why=_OTHERS)
    if node.type != "Pad" or not label.has_rows or letters[label.axis] is not None:
        return Axes({0: letters}, letters)
    label = node.whole()
    pairs = zip(pads, node.rows, strict=True)
    counts = [pad[label.axis] / (count * label.inner) for pad, count in pairs]
    if not np.array_equal(*counts) or np.any(counts[0] % 1):
        raise Mixes(_OTHERS)
    return label._replace(blocks=label.blocks + int(sum(counts[0])))


@rule("ReverseV2 Roll", terms=ALL, why="changes the order of the rows of one replica")
def turned(node: Node) -> Axes:
    """Moves values along some axes."""
    letters: list[Any] = [*range(node.rank(0))]
    for axis in np.ravel(node.value(1 if node.type == "ReverseV2" else 2)):
        letters[int(axis)] = None
    return Axes({0: letters}, letters)


@rule("GatherV2", terms=(0,), why=_PLACES)
def gathered(node: Node) -> Axes:
    """Takes values by their numbers along an axis."""
    shared = node.attribute("batch_dims")
    values: list[Any] = [*range(node.rank(0))]
    axis = values[int(node.value(2))]
    values[axis] = None
    places = [*range(shared), *(f"place {number}" for number in range(node.rank(1) - shared))]
    return Axes({0: values, 1: places}, [*values[:axis], *places[shared:], *values[axis + 1 :]])


@rule("GatherNd")
def gathered_by_index(node: Node) -> Label:
    """Takes slices by their places, along the last axis of the second input."""
    indices = node.label(1)
    depth = node.shape(1)[-1]  # so many of the first axes are counted by an index
    if depth is None:
        raise NoRule("a shape is unknown")
    rest = range(node.rank(0) - depth)
    outer = range(-node.rank(1), -1)  # letters that `rest` lacks
    letters: list[Any] = [*[None] * depth, *rest]
    if node.label(0).places or indices.places not in (0, INDEX):
        raise Mixes(BY_PLACE)
    # An index that begins with the number of its own row takes from that row alone.
    if indices.places == INDEX:
        values = node.whole()
        if (values.kind, values.axis, values.blocks, values.inner) == (ROWS, 0, 1, 1):
            letters[0] = outer[indices.axis]
    axes = Axes({0: letters, 1: [*outer, None]}, [*outer, *rest])
    return label_by_letters(node, axes, (0,), why=_PLACES)._replace(places=0)


@rule("UnsortedSegmentSum")
def segments(node: Node) -> Label:
    """Adds up values by the number of their segment."""
    values = range(node.rank(0))
    letters = range(node.rank(1))
    return _added_at(node, 0, 1, Axes({0: values, 1: letters}, [None, *values[len(letters) :]]))


@rule("ScatterNd")
def scattered(node: Node) -> Label:
    """Adds up values at their places in zeros."""
    outer = range(node.rank(0) - 1)
    values = range(node.rank(1))
    rest = values[len(outer) :]
    depth = len(node.values(2)[0]) - len(rest)
    return _added_at(node, 1, 0, Axes({0: [*outer, None], 1: values}, [*[None] * depth, *rest]))


def _added_at(node: Node, values: int, places: int, axes: Axes) -> Label:
    """Returns the label of these values, added up at these places."""
    counted = node.label(places).places
    if not counted:
        return label_by_letters(node, axes, (values,), sums=True)

    # The places of a row are its own, where the gradient of what took values from them says so.
    inner = 1 if counted == INDEX else counted
    lengths = [np.ravel(of_trace)[0] for of_trace in node.values(2)]
    of_gradient = re.search(r"(^|/)gradients?(_tape)?/", node.operations[0].name)
    whole = lengths == [inner * rows for rows in node.rows]
    own = of_gradient and (node.type != "ScatterNd" or node.shape(places)[-1] == 1)
    if not whole or not (counted == INDEX or own):
        raise Mixes(BY_PLACE)
    summed = label_by_letters(node, axes, (values,), sums=True)
    return summed if summed.kind == ZERO else Label(ROWS, inner=inner, power=summed.power)


@rule(
    "Where Unique UniqueV2 UniqueWithCounts DynamicPartition NonMaxSuppressionV3 SegmentSum"
    " SegmentMean"
)
def by_values(node: Node) -> Label:
    """Has an output whose length the values decide."""
    if not all(node.label(number).is_same for number in range(len(node.labels))):
        raise Mixes("has as many rows as the values of one replica's rows say")
    return Label(SAME)


@rule("Range")
def places_in_a_row(node: Node) -> Label:
    """Counts from a start to a limit: `inner` values a row, if the rows decide the limit."""
    if all(node.label(number).is_same for number in range(3)):
        return Label(SAME)
    if not node.dtype.is_integer:
        raise Mixes(BY_PLACE)
    lengths = []
    for trace, rows in enumerate(node.rows):
        start, limit, step = (int(node.values(number)[trace]) for number in range(3))
        lengths.append(len(range(start, limit, step)) / rows)
    inner = int(lengths[0])
    begin = node.value(0)
    step = node.value(2)
    if step < 0 or lengths != [inner, inner]:  # a label has no negative places
        raise Mixes(BY_PLACE)
    is_number = (inner, int(begin), int(step)) == (1, 0, 1)  # the number of each row
    return Label(ROWS, inner=inner, places=inner * int(step), is_number=is_number)


# A list is labelled as each of its tensors is. The rules of lists read no shape.


@rule("TensorListReserve EmptyTensorList")
def new_list(node: Node) -> Label:
    """Makes a list of nothing, which counts as zeros."""
    node.read.add(0)
    return Label(ZERO)


@rule("TensorListFromTensor", terms=(0,), why="makes a list of the rows of one replica")
def list_of(node: Node) -> Axes:
    """Cuts the first axis into a list."""
    node.read.add(1)
    return Axes({0: [None, *range(1, node.rank(0))]}, range(1, node.rank(0)))


@rule("TensorListStack")
def list_stacked(node: Node) -> Label:
    """Joins a list along a new first axis."""
    label = node.label(0)
    node.read.add(1)
    return label._replace(axis=label.axis + 1) if label.has_rows else label


@rule("TensorListSetItem TensorListPushBack")
def list_with(node: Node) -> Label:
    """Puts a tensor into a list."""
    return _in_list(node.label(0), node.label(len(node.labels) - 1))


@rule("TensorListGetItem TensorListPopBack")
def list_item(node: Node) -> Label:
    """Takes a tensor of a list, and gives the rest of it too."""
    node.read.add(len(node.labels) - 1)
    return node.label(0)


@rule("TensorListLength")
def list_length(node: Node) -> Label:
    """Gives a length, which no values decide."""
    node.label(0)
    return Label(SAME)


@rule("TensorListElementShape")
def list_shape(node: Node) -> Label:
    """Gives a shape, which the rules of lists do not read."""
    node.label(0)
    return Label(UNKNOWN, why="gives the shape of a list's tensors")


@rule("AddN", terms=ALL)
def added(node: Node) -> Axes | Label:
    """Adds tensors, or lists of them."""
    if node.dtype.is_numpy_compatible:
        return broadcast(node)
    label = node.label(0)
    for number in range(1, len(node.labels)):
        label = _in_list(label, node.label(number))
    return label


def _in_list(first: Label, second: Label) -> Label:
    label = joined(first, second)
    if label.kind == UNKNOWN:
        raise NoRule("makes a list of tensors that are not alike")
    return label
