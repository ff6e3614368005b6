"""Rules of operations that move values to other places: shapes, slices, joins, places by number, lists, draws."""

import math
from typing import Any

import numpy as np

from trainer.proof.arithmetic import NOT_LINEAR, added, rule
from trainer.proof.labels import ROWS, SAME, SUM, UNIFORM, UNKNOWN, ZERO, Label, Mixes, NoRule, joined
from trainer.proof.node import Node, scaled_axes

# Of some operations: the inputs that are sizes, axes or other settings, not values.
SETTINGS = {
    "ArgMax": (1,),
    "ArgMin": (1,),
    "AvgPoolGrad": (0,),
    "AvgPool3DGrad": (0,),
    "BroadcastGradientArgs": (0, 1),
    "BroadcastTo": (1,),
    "Conv2DBackpropFilter": (1,),
    "Conv2DBackpropInput": (0,),
    "Conv3DBackpropFilterV2": (1,),
    "Conv3DBackpropInputV2": (0,),
    "Cumprod": (1,),
    "Cumsum": (1,),
    "DenseBincount": (1,),
    "DepthwiseConv2dNativeBackpropFilter": (1,),
    "DepthwiseConv2dNativeBackpropInput": (0,),
    "ExpandDims": (1,),
    "Fill": (0,),
    "GatherV2": (2,),
    "MirrorPad": (1,),
    "MirrorPadGrad": (1,),
    "OneHot": (1,),
    "Pad": (1,),
    "PadV2": (1,),
    "Reshape": (1,),
    "ResizeBilinear": (1,),
    "ResizeBicubic": (1,),
    "ResizeNearestNeighbor": (1,),
    "ResizeNearestNeighborGrad": (1,),
    "ReverseV2": (1,),
    "Roll": (1, 2),
    "ScatterNd": (2,),
    "Slice": (1, 2),
    "Split": (0,),
    "SplitV": (1, 2),
    "StridedSlice": (1, 2, 3),
    "StridedSliceGrad": (0, 1, 2, 3),
    "TensorListFromTensor": (1,),
    "TensorListGetItem": (2,),
    "TensorListReserve": (0,),
    "EmptyTensorList": (0,),
    "TensorListPopBack": (1,),
    "TensorListStack": (1,),
    "Tile": (1,),
    "Transpose": (1,),
    "UnsortedSegmentSum": (2,),
    "ImageProjectiveTransformV3": (2,),
    **dict.fromkeys(("Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "EuclideanNorm"), (1,)),
}
_PLACES = "takes some rows of one replica by their places"


def _same_order(labels: list[Label]) -> Label:
    """Returns the label that several inputs share which lie beside each other: rows, or else what can be added."""
    powers = {label.power for label in labels}
    with_rows = {label._replace(of_metric=False) for label in labels if label.has_rows}
    if len(powers) > 1:
        raise Mixes("joins what is divided by the rows of one replica, or by the replicas, and what is not")
    if any(label.kind == SUM for label in labels) and with_rows:
        raise Mixes("joins rows and a sum over the rows of one replica")
    in_order = {label for label in with_rows if label.kind == ROWS} or with_rows
    if len(in_order) > 1 or len({label.axis for label in with_rows}) > 1:
        raise NoRule("joins rows in different orders")
    return next(iter(in_order)) if in_order else labels[0]


def _parts(node: Node, numbers: range) -> Label:
    """Returns the label that the joined inputs share; ZERO if all of them are zeros."""
    labels = [node.labels[number] for number in numbers]
    if all(label.kind == ZERO for label in labels):
        return Label(ZERO)
    if any(label.kind == SUM for label in labels):
        labels = [label.as_sum() for label in labels]
    power = next(label.power for label in labels if label.kind != ZERO)
    settled = [
        node.settled(number)._replace(power=power) if label.kind == ZERO else label
        for number, label in zip(numbers, labels, strict=True)
    ]
    if any(label.kind == SUM for label in labels):
        settled = [label._replace(kind=SUM) if label.kind == SAME else label for label in settled]
    return _same_order(settled)


@rule("Shape ShapeN Size Rank VariableShape")
def shape(node: Node) -> list[Label]:
    """Is computed while labels are found, unless a size follows from what rows hold."""
    if all(label.kind == SAME for label in node.labels):
        return [Label(SAME)] * len(node.operations[0].outputs)
    raise NoRule("gives a size that is known only when the step runs")


@rule("Reshape")
def reshaped(node: Node) -> Label:
    """Keeps the order of all values: the axis of rows may join or leave its neighbours."""
    label = node.whole() if node.labels[0].kind != ZERO else node.labels[0]
    if not label.has_rows:
        return node.labels[0]
    shapes = node.shapes[0]
    sizes = []
    for number in (0, 1):
        given, target = shapes[number], node.output_shapes()[number]
        if node.known[1] is not None:
            target = tuple(int(size) for size in node.values(1)[number])
            target = tuple(None if size < 0 else size for size in target)
        if given is None or None in given or target is None or target.count(None) > 1:
            raise NoRule("a shape is unknown")
        rest = math.prod(given) // max(1, math.prod(size for size in target if size is not None))
        sizes.append([rest if size is None else size for size in target])
    scaled = scaled_axes((tuple(sizes[0]), tuple(sizes[1])))
    if len(scaled) != 1:
        raise Mixes("cuts the rows of one replica by their number")
    (axis,) = scaled
    orders = [(label.blocks, label.inner)]
    if node.labels[0].kind == UNIFORM:  # whose rows are in any order
        orders.append((label.inner, label.blocks))
    for order in orders:
        before = math.prod(node.shape(0)[: label.axis]) * order[0]
        after = math.prod(node.shape(0)[label.axis + 1 :]) * order[1]
        outer = math.prod(sizes[0][:axis])
        blocks = before // outer
        inner = sizes[0][axis] // (node.rows[0] * blocks) if blocks else 0
        if blocks * outer == before and inner * math.prod(sizes[0][axis + 1 :]) == after:
            one_kind = node.labels[0].kind == UNIFORM and (blocks, inner) == order
            return label._replace(kind=UNIFORM if one_kind else ROWS, axis=axis, blocks=blocks, inner=inner)
    raise Mixes("joins several rows of one replica")


@rule("Transpose")
def transposed(node: Node) -> Label:
    """Moves axes."""
    label = node.labels[0]
    return label._replace(axis=[int(axis) for axis in node.value(1)].index(label.axis)) if label.has_rows else label


@rule("ExpandDims")
def with_new_axis(node: Node) -> Label:
    """Adds an axis."""
    label = node.labels[0]
    if not label.has_rows:
        return label
    axis = int(node.value(1)) % (len(node.shape(0)) + 1)
    return label._replace(axis=label.axis + (axis <= label.axis))


@rule("Squeeze")
def squeezed(node: Node) -> Label:
    """Drops axes of the length 1, of which rows are none."""
    label = node.labels[0]
    if not label.has_rows:
        return label
    dims, sizes = node.attribute("squeeze_dims"), node.shape(0)
    gone = {axis % len(sizes) for axis in dims} or {axis for axis, size in enumerate(sizes) if size == 1}
    return label._replace(axis=label.axis - sum(axis < label.axis for axis in gone))


@rule("Fill")
def filled(node: Node) -> Label:
    """Repeats one value."""
    return node.labels[1] if node.labels[1].kind == ZERO else _repeated(node, node.labels[1], node.values(0))


@rule("BroadcastTo")
def broadcast(node: Node) -> Label:
    """Repeats values along axes of the length 1, and new ones."""
    label = node.labels[0]
    if label.has_rows:
        return label._replace(axis=label.axis + node.rank() - len(node.shape(0)))
    return _repeated(node, label, node.values(1))


def _repeated(node: Node, label: Label, sizes: tuple[Any, Any]) -> Label:
    """Returns the label of values without rows that are repeated to these sizes."""
    if label.kind == ZERO:
        return label
    scaled = [axis for axis, pair in enumerate(zip(*sizes, strict=True)) if pair[0] != pair[1]]
    if not scaled:
        return label
    if label.kind != SAME:
        raise Mixes("gives a sum over the rows of one replica to each row")
    if len(scaled) > 1:
        raise Mixes("pairs the rows of one replica with each other")
    return label._replace(kind=UNIFORM, axis=scaled[0])


@rule("Tile")
def tiled(node: Node) -> Label:
    """Repeats all values along axes."""
    label, (first, second) = node.labels[0], node.values(1)
    scaled = [axis for axis, pair in enumerate(zip(first, second, strict=True)) if pair[0] != pair[1]]
    if label.has_rows and not scaled:
        label = node.whole()
        return label._replace(blocks=label.blocks * int(first[label.axis]))
    if scaled and node.shape(0)[scaled[0]] != 1:
        raise NoRule("repeats several values once for each row")
    return _repeated(node, label, (first, second)) if not label.has_rows else _pairs()


def _pairs() -> Label:
    raise Mixes("pairs the rows of one replica with each other")


@rule("Pack")
def stacked(node: Node) -> Label:
    """Adds an axis along which the inputs lie."""
    label = _parts(node, range(len(node.labels)))
    axis = node.attribute("axis") % node.rank()
    return label._replace(axis=label.axis + (axis <= label.axis)) if label.has_rows else label


@rule("Unpack")
def unstacked(node: Node) -> list[Label]:
    """Takes each place of an axis by itself."""
    label = node.labels[0]
    if label.has_rows:
        axis = node.attribute("axis") % len(node.shape(0))
        if axis == label.axis:
            raise Mixes(_PLACES)
        label = label._replace(axis=label.axis - (axis < label.axis))
    return [label] * len(node.operations[0].outputs)


@rule("ConcatV2")
def concatenated(node: Node) -> Label:
    """Lays batches one after another, or their features side by side."""
    numbers = range(len(node.labels) - 1)
    axis = int(node.value(len(numbers))) % node.rank()
    labels = [node.settled(number) for number in numbers]
    if not any(label.has_rows and label.axis == axis for label in labels):
        return _parts(node, numbers)
    if all(label.kind == ZERO for label in node.labels[:-1]):
        return Label(ZERO)
    whole = [node.whole(number) for number in numbers]
    if any(label.kind != ROWS or label.axis != axis for label in whole):
        raise Mixes("puts other values among the rows of one replica")
    ordered = [label for label, given in zip(whole, labels, strict=True) if given.kind == ROWS]
    inner = ordered[0].inner if ordered else 1
    blocks = 0
    for label, given in zip(whole, labels, strict=True):
        repeats = label.blocks * label.inner
        if (given.kind == ROWS and label.inner != inner) or repeats % inner:
            raise NoRule("joins rows in different orders")
        blocks += repeats // inner
    powers = {label.power for label in node.labels[:-1] if label.kind != ZERO}
    if len(powers) > 1:
        raise Mixes("joins what is divided by the rows of one replica, or by the replicas, and what is not")
    return Label(ROWS, axis, blocks, inner, powers.pop())


@rule("Split")
def split(node: Node) -> list[Label]:
    """Cuts an axis into equal parts: that of rows between batches only."""
    count = len(node.operations[0].outputs)
    label = node.labels[1]
    if not label.has_rows:
        return [label] * count
    if int(node.value(0)) % len(node.shape(1)) != label.axis:
        return [label] * count
    label = node.whole(1)
    return [_cut(label, label.blocks / count)] * count


@rule("SplitV")
def split_by_sizes(node: Node) -> list[Label]:
    """Cuts an axis into parts: that of rows between batches only."""
    label, outputs = node.labels[0], node.operations[0].outputs
    if not label.has_rows or int(node.value(2)) % len(node.shape(0)) != label.axis:
        return [label] * len(outputs)
    label = node.whole()
    by_row = [sizes / rows for sizes, rows in zip(node.values(1), node.rows, strict=True)]
    if not np.array_equal(*by_row):
        raise Mixes(_PLACES)
    return [_cut(label, size / label.inner) for size in by_row[0]]


def _cut(label: Label, blocks: float) -> Label:
    """Returns the label of so many batches."""
    if blocks != int(blocks) or blocks < 1:
        raise Mixes(_PLACES)
    return label._replace(blocks=int(blocks))


def _batches(label: Label, bounds: tuple[tuple[int, int], ...], rows: tuple[int, int]) -> Label:
    """Returns the label of the batches between places of the axis of rows, (first, end) in each trace."""
    ends = {tuple(place / (count * label.inner) for place in pair) for pair, count in zip(bounds, rows, strict=True)}
    first, end = ends.pop()
    if ends or first != int(first):
        raise Mixes(_PLACES)
    return _cut(label, end - first)


@rule("Slice")
def part(node: Node) -> Label:
    """Takes a part of each axis."""
    label = node.labels[0]
    if not label.has_rows:
        return label
    whole = node.whole()
    output, given = node.output_shapes(), node.shapes[0]
    if all(
        of is not None and inside is not None and of[label.axis] == inside[label.axis]
        for of, inside in zip(output, given, strict=True)
    ):
        return label
    begins, sizes = node.values(1), node.values(2)
    bounds = tuple(
        (int(begin[label.axis]), int(begin[label.axis] + size[label.axis]))
        for begin, size in zip(begins, sizes, strict=True)
    )
    return _batches(whole, bounds, node.rows)


class _Spec:
    """Reads the numbers and masks of a strided slice: what becomes of each axis."""

    def __init__(self, node: Node, first_setting: int, rank: int) -> None:
        masks = {
            name: node.attribute(f"{name}_mask") for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
        }
        begins, ends, strides = (node.values(first_setting + number) for number in range(3))
        count = len(begins[0])
        named = [place for place in range(count) if not (masks["new_axis"] | masks["ellipsis"]) >> place & 1]
        self.output: list[int | None] = []  # of each axis: its place in the output; None once an index takes it away
        self.bounds: list[Any] = []  # of each axis: begin, end and stride in each trace; None where it stays whole
        place_in_output = 0
        for place in range(count):
            if masks["ellipsis"] >> place & 1:
                for _ in range(rank - len(named)):
                    self._keep(place_in_output, None)
                    place_in_output += 1
            elif masks["new_axis"] >> place & 1:
                place_in_output += 1
            elif masks["shrink_axis"] >> place & 1:
                self._keep(None, ())
            else:
                open_ends = masks["begin"] >> place & 1, masks["end"] >> place & 1
                bounds = [
                    (
                        None if open_ends[0] else int(begin[place]),
                        None if open_ends[1] else int(end[place]),
                        int(stride[place]),
                    )
                    for begin, end, stride in zip(begins, ends, strides, strict=True)
                ]
                self._keep(place_in_output, bounds)
                place_in_output += 1
        while len(self.output) < rank:
            self._keep(place_in_output, None)
            place_in_output += 1

    def _keep(self, output: int | None, bounds: Any) -> None:
        self.output.append(output)
        self.bounds.append(bounds)

    def batches(self, axis: int, lengths: tuple[int, int], label: Label, rows: tuple[int, int]) -> Label | None:
        """Returns the label of the batches that the slice has of an axis of these lengths; None for all of them."""
        if self.bounds[axis] is None:
            return None
        if self.output[axis] is None:
            raise Mixes(_PLACES)
        if any(stride != 1 for _, _, stride in self.bounds[axis]):
            raise Mixes("takes every other row of one replica, or turns their order round")
        ranges = tuple(
            slice(begin, end).indices(length)[:2]
            for (begin, end, _), length in zip(self.bounds[axis], lengths, strict=True)
        )
        if all(given == (0, length) for given, length in zip(ranges, lengths, strict=True)):
            return None
        return _batches(label, ranges, rows)


@rule("StridedSlice")
def strided(node: Node) -> Label:
    """Takes a part of each axis by numbers and masks."""
    label = node.labels[0]
    if not label.has_rows:
        return label
    shapes = node.shapes[0]
    spec = _Spec(node, 1, len(node.shape(0)))
    if spec.bounds[label.axis] is not None:
        lengths = tuple(given[label.axis] for given in shapes if given is not None)
        if None in lengths:
            raise NoRule("a number of rows is unknown")
        cut = spec.batches(label.axis, lengths, node.whole(), node.rows)
        label = cut or label
    place = spec.output[label.axis]
    assert place is not None
    return label._replace(axis=place)


@rule("StridedSliceGrad")
def strided_gradient(node: Node) -> Label:
    """Puts values into zeros, where a strided slice took them from."""
    label, (first, second) = node.labels[4], node.values(0)
    if not label.has_rows:
        return label
    spec = _Spec(node, 1, len(first))
    if label.axis not in spec.output:
        raise NoRule("adds an axis")
    axis = spec.output.index(label.axis)
    lengths = int(first[axis]), int(second[axis])
    label, rows = node.whole(4), node.rows
    if lengths[0] % (rows[0] * label.inner):
        raise Mixes(_PLACES)
    around = label._replace(blocks=lengths[0] // (rows[0] * label.inner))
    spec.batches(axis, lengths, around, rows)
    return around._replace(axis=axis)


@rule("Pad PadV2 MirrorPad MirrorPadGrad")
def padded(node: Node) -> Label:
    """Adds values around others: along rows only whole batches of zeros."""
    label = node.labels[0]
    if node.type == "PadV2" and node.labels[2].kind != ZERO and (label.kind == SUM or label.power):
        raise Mixes(NOT_LINEAR)
    if not label.has_rows:
        return label
    first, second = node.values(1)
    around = [tuple(map(int, pads[label.axis])) for pads in (first, second)]
    if not any(map(any, around)):
        return label
    if node.type != "Pad":
        raise Mixes("puts other values among the rows of one replica")
    label = node.whole()
    blocks = {tuple(pad / (rows * label.inner) for pad in pads) for pads, rows in zip(around, node.rows, strict=True)}
    before, after = blocks.pop()
    if blocks or before != int(before) or after != int(after):
        raise Mixes("puts other values among the rows of one replica")
    return label._replace(blocks=label.blocks + int(before + after))


@rule("ReverseV2 Roll")
def turned(node: Node) -> Label:
    """Moves values along some axes."""
    label = node.labels[0]
    axes = node.value(1 if node.type == "ReverseV2" else 2)
    if label.has_rows and label.axis in {int(axis) % len(node.shape(0)) for axis in np.ravel(axes)}:
        raise Mixes("changes the order of the rows of one replica")
    return label


@rule("GatherV2")
def gathered(node: Node) -> Label:
    """Takes values by their numbers along an axis."""
    values, places = node.labels[0], node.settled(1)
    if places.kind == SUM or places.power:
        raise Mixes(NOT_LINEAR)
    axis, batches = int(node.value(2)) % len(node.shape(0)), node.attribute("batch_dims")
    if not places.has_rows:
        if values.has_rows and values.axis == axis:
            raise Mixes(_PLACES)
        added_axes = len(node.shape(1)) - batches - 1
        if values.has_rows and values.axis > axis:
            values = values._replace(axis=values.axis + added_axes)
        return values
    if values.kind == SUM:
        raise Mixes("gives a part of a sum over the rows of one replica to each row")
    places = node.whole(1)
    if values.has_rows:
        values = node.whole()
        both = (values.axis, values.blocks, values.inner) == (places.axis, places.blocks, places.inner)
        if not (both and places.axis < batches):
            raise Mixes("picks rows of one replica by rows")
        return values
    if places.axis < batches:
        raise NoRule("has a batch of one side alone")
    return places._replace(axis=places.axis - batches + axis, power=values.power)


@rule("GatherNd")
def gathered_by_index(node: Node) -> Label:
    """Takes slices by their places, along the last axis of the second input."""
    values, places = node.labels[0], node.settled(1)
    if places.kind == SUM or places.power:
        raise Mixes(NOT_LINEAR)
    if not (values.has_rows or places.has_rows):
        return values
    if values.has_rows or values.kind == SUM or places.axis == len(node.shape(1)) - 1:
        raise Mixes("picks rows of one replica by their places")
    return places._replace(power=values.power)


@rule("UnsortedSegmentSum")
def segments(node: Node) -> Label:
    """Adds up values by the number of their segment."""
    values, places = node.labels[0], node.settled(1)
    if places.kind == SUM or places.power:
        raise Mixes(NOT_LINEAR)
    node.value(2)
    if values.kind == ZERO:
        return values
    if not places.has_rows:
        if values.has_rows and values.axis < len(node.shape(1)):
            raise NoRule("has rows of one side alone")
        return values._replace(axis=values.axis - len(node.shape(1)) + 1) if values.has_rows else values
    if not values.has_rows:
        raise NoRule("has rows of one side alone")
    values, places = node.whole(), node.whole(1)
    if (values.axis, values.blocks, values.inner) != (places.axis, places.blocks, places.inner):
        raise Mixes("pairs the rows of one replica with each other")
    return Label(SUM, power=values.power)


@rule("ScatterNd")
def scattered(node: Node) -> Label:
    """Adds up values at their places in zeros."""
    places, values = node.settled(0), node.labels[1]
    if places.kind == SUM or places.power:
        raise Mixes(NOT_LINEAR)
    node.value(2)
    if values.kind == ZERO or not (places.has_rows or values.has_rows):
        return values
    outer = len(node.shape(0)) - 1
    if not places.has_rows:
        if values.axis < outer:
            raise NoRule("has rows of one side alone")
        return values._replace(axis=values.axis + node.rank() - len(node.shape(1)))
    places = node.whole(0)
    if not values.has_rows or places.axis >= outer:
        raise NoRule("has rows of one side alone")
    values = node.whole(1)
    if (values.axis, values.blocks, values.inner) != (places.axis, places.blocks, places.inner):
        raise Mixes("pairs the rows of one replica with each other")
    return Label(SUM, power=values.power)


@rule("OneHot")
def one_hot(node: Node) -> Label:
    """Adds an axis of so many classes."""
    label = node.settled(0)
    node.value(1)
    if label.kind == SUM or any(other.power or other.kind not in (SAME, ZERO) for other in node.labels[2:]):
        raise Mixes(NOT_LINEAR)
    if label.power:
        raise Mixes("is not linear in what depends on how many rows a replica has")
    if not label.has_rows:
        return label
    axis = node.attribute("axis") % node.rank()
    return label._replace(axis=label.axis + (axis <= label.axis))


@rule("Where Unique UniqueV2 UniqueWithCounts DynamicPartition NonMaxSuppressionV3 SegmentSum SegmentMean")
def by_values(node: Node) -> list[Label]:
    """Has an output whose length the values decide."""
    if any(label.kind not in (SAME, ZERO) or label.power for label in node.labels):
        raise Mixes("has as many rows as the values of one replica's rows say")
    return [Label(SAME)] * len(node.operations[0].outputs)


# A list is labelled as each of its tensors is.


@rule("TensorListReserve EmptyTensorList")
def new_list(node: Node) -> Label:
    """Makes a list of nothing, which counts as zeros."""
    return Label(ZERO)


@rule("TensorListFromTensor")
def list_of(node: Node) -> Label:
    """Cuts the first axis into a list."""
    label = node.whole() if node.labels[0].kind != ZERO else node.labels[0]
    if label.has_rows and label.axis == 0:
        raise Mixes("makes a list of the rows of one replica")
    return label._replace(axis=label.axis - 1) if label.has_rows else label


@rule("TensorListStack")
def list_stacked(node: Node) -> Label:
    """Joins a list along a new first axis."""
    label = node.labels[0]
    return label._replace(axis=label.axis + 1) if label.has_rows else label


@rule("TensorListSetItem TensorListPushBack")
def list_with(node: Node) -> Label:
    """Puts a tensor into a list."""
    return _in_list(node.labels[0], node.labels[-1])


@rule("TensorListGetItem")
def list_item(node: Node) -> Label:
    """Takes a tensor of a list."""
    return node.labels[0]


@rule("TensorListPopBack")
def list_popped(node: Node) -> list[Label]:
    """Takes the last tensor of a list, and gives the rest of it too."""
    return [node.labels[0]] * 2


@rule("TensorListLength TensorListElementShape")
def list_length(node: Node) -> Label:
    """Gives a length, which no values decide, or a shape, which the rules of lists do not read."""
    return Label(SAME) if node.type == "TensorListLength" else Label(UNKNOWN, why="gives the shape of a list's tensors")


def _in_list(first: Label, second: Label) -> Label:
    label = joined(first, second)
    if label.kind == UNKNOWN:
        raise NoRule("makes a list of tensors that are not alike")
    return label


@rule("AddN")
def added_lists(node: Node) -> Label:
    """Adds tensors, or lists of them."""
    if not node.operations[0].outputs[0].dtype.is_numpy_compatible:
        label = node.labels[0]
        for other in node.labels[1:]:
            label = _in_list(label, other)
        return label
    return added(node)
