"""Draws calls of every operation that has a rule: shapes, axes, and what the inputs are to the
whole batch."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from tests.trainer.proof.halves import Given
from trainer.proof.arithmetic import RULES, broadcast, of_multiples
from trainer.proof.labels import ROWS, SAME, SUM, UNIFORM, Label

raw = tf.raw_ops
Case = tuple[Callable[..., Any], list[Given]]
CASES: dict[str, Callable[[Any], Case]] = {}


def case(types: str) -> Any:
    def keep(function: Any) -> Any:
        for name in types.split():
            CASES[name] = partial(function, name)
        return function

    return keep


def positive(x: Any) -> Any:
    return tf.matmul(x, x, transpose_b=True) + 3.0 * tf.eye(3, dtype=x.dtype)


def to_complex(x: Any) -> Any:
    return tf.cast(x, tf.complex64)


def to_float32(x: Any) -> Any:
    return tf.cast(x, tf.float32)


# What becomes of an operation's first input, and the options that each of its calls has.
_FIRST: dict[str, Any] = {
    **dict.fromkeys(("Real", "Imag", "FFT", "IFFT", "IRFFT"), to_complex),
    **dict.fromkeys(("RFFT", "InTopKV2", "SegmentMean"), to_float32),
    **dict.fromkeys(("Cholesky", "MatrixInverse", "MatrixDeterminant"), positive),
    **dict.fromkeys(("LogMatrixDeterminant", "Svd", "Qr", "SelfAdjointEigV2"), positive),
    **dict.fromkeys(("StaticRegexReplace", "StringToHashBucketFast"), tf.strings.as_string),
    **dict.fromkeys(("StringLower", "StringUpper"), tf.strings.as_string),
    "Where": lambda x: x > 1,
}
_OPTIONS: dict[str, dict[str, Any]] = {
    "Bucketize": {"boundaries": [0.3, 0.6]},
    "BatchMatMulV3": {"Tout": tf.float64},
    "Bitcast": {"type": tf.int64},
    "CheckNumerics": {"message": "m"},
    "IRFFT": {"fft_length": [4]},
    "MatrixBandPart": {"num_lower": 0, "num_upper": 1},
    "MirrorPad": {"mode": "SYMMETRIC"},
    "MirrorPadGrad": {"mode": "SYMMETRIC"},
    "PadV2": {"constant_values": 2.0},
    "RFFT": {"fft_length": [3]},
    "SelfAdjointEigV2": {"compute_v": False},
    "StaticRegexReplace": {"pattern": "1", "rewrite": "2"},
    "StringToHashBucketFast": {"num_buckets": 7},
    "Svd": {"compute_uv": False},
    "TopKV2": {"k": 2},
}
_OF_LISTS = ("AddN", "IdentityN", "Pack", "ConcatV2", "Einsum")
_PART = {"Svd": 0, "Qr": 1, "SelfAdjointEigV2": 0}  # of several results


def op(name: str, *then: Any, **options: Any) -> Callable[..., Any]:
    """Returns a call of an operation, `call(rows, *inputs)`; what is a function is one of the
    rows."""
    function = getattr(raw, name)
    options |= _OPTIONS.get(name, {})
    names = [each for each in inspect.signature(function).parameters if each not in options]

    def call(rows: int, *given: Any) -> Any:
        first, *others = [given] if name in _OF_LISTS else given
        first = _FIRST.get(name, lambda x: x)(first)
        arguments = {**dict(zip(names, (first, *others, *then), strict=False)), **options}
        result = function(
            **{key: of(rows) if callable(of) else of for key, of in arguments.items()}
        )
        return result[_PART[name]] if name in _PART else result

    return call


def number(draw: Any, low: int, high: int) -> int:
    return int(draw.integers(low, high))


def rows_of(draw: Any, axis: int, *, power: bool = False) -> Label:
    """Draws a label of rows along an axis."""
    blocks, inner = (number(draw, 1, 3) for _ in range(2))
    return Label(ROWS, axis, blocks, inner, number(draw, -1, 2) if power else 0)


def any_label(draw: Any, rank: int, *, power: bool = False) -> Label:
    """Draws any label of a tensor with so many axes."""
    kind = str(draw.choice([SAME, ROWS, ROWS, UNIFORM, SUM])) if rank else SAME
    power = power and draw.random() < 0.4
    if kind in (SAME, SUM):
        return Label(kind, power=number(draw, -1, 2) if power else 0)
    label = rows_of(draw, number(draw, 0, rank), power=power)
    return label if kind == ROWS else label._replace(kind=UNIFORM, blocks=1, inner=1)


def sizes_of(draw: Any, rank: int) -> tuple[int, ...]:
    return tuple(int(size) for size in draw.integers(2, 5, rank))


def tensor(draw: Any, rank: int | None = None, label: Label | None = None, **options: Any) -> Given:
    rank = number(draw, 1, 4) if rank is None else rank
    return Given(label or any_label(draw, rank, power=True), sizes_of(draw, rank), **options)


def together(draw: Any, count: int, *, broadcasts: bool = True, **options: Any) -> list[Given]:
    """Draws inputs of one shape, or of one that broadcasts."""
    rank = number(draw, 1, 4)
    sizes = sizes_of(draw, rank)
    label = any_label(draw, rank, power=True)
    inputs = []
    for _ in range(count):
        own = label
        if label.kind == SUM:
            own = Label(str(draw.choice([SUM, SAME])), power=label.power + number(draw, 0, 2))
        elif draw.random() < 0.3:
            own = label._replace(power=number(draw, -1, 2))
        inputs.append(Given(own, sizes, **options))
        if label.has_rows and len(inputs) > 1 and broadcasts and draw.random() < 0.5:
            narrow = tuple(1 if axis == label.axis else size for axis, size in enumerate(sizes))
            inputs[-1] = Given(Label(SAME, power=own.power), narrow, **options)
    return inputs


_BITS = {"dtype": tf.int32, "low": 0, "high": 5}
_BOOL = {"dtype": tf.bool}
_KINDS: dict[str, Any] = {
    **dict.fromkeys(("LogicalAnd", "LogicalNot", "LogicalOr", "All", "Any"), _BOOL),
    **dict.fromkeys(("BitwiseAnd", "BitwiseOr", "BitwiseXor", "Invert"), _BITS),
    **dict.fromkeys(("RightShift", "LeftShift"), _BITS),
    "Acosh": {"low": 1.1, "high": 3.0},
}
_BY_VALUE = (broadcast, of_multiples)
_ELEMENTWISE = [name for name, of in RULES.items() if getattr(of, "__wrapped__", None) in _BY_VALUE]


@case(" ".join(_ELEMENTWISE))
@case(
    "Mul MulNoNan RealDiv DivNoNan Identity StopGradient PreventGradient Snapshot Neg"
    " CheckNumerics ZerosLike OnesLike L2Loss AddN IdentityN Pack"
)
def value_by_value(name: str, draw: Any) -> Case:
    count = 3 if name in _OF_LISTS else len(op_def_registry.get(name).input_arg)
    alike = name in (*_OF_LISTS, "ClipByValue") or name.endswith("Grad")
    inputs = together(draw, count, broadcasts=not alike, **_KINDS.get(name, {}))
    if name == "Pack":
        return op(name, axis=number(draw, 0, len(inputs[0].sizes) + 1)), inputs
    return op(name), inputs


@case("Real Imag EnsureShape PlaceholderWithDefault Cast")
def of_one(name: str, draw: Any) -> Case:
    x = tensor(draw)
    if name == "Cast":
        return op(name, [tf.float32, tf.int32, tf.bool][number(draw, 0, 3)]), [x]
    return op(name, *([] if name in _FIRST else [[None] * len(x.sizes)])), [x]


@case("Select SelectV2")
def selections(name: str, draw: Any) -> Case:
    first, *others = together(draw, 3, broadcasts=name == "SelectV2")
    kind = SAME if first.label.kind == SUM else first.label.kind
    return op(name), [
        Given(first.label._replace(power=0, kind=kind), first.sizes, tf.bool),
        *others,
    ]


@case("Sum Mean Max Min Prod All Any EuclideanNorm")
def reductions(name: str, draw: Any) -> Case:
    given = tensor(draw, **_KINDS.get(name, {}))
    rank = len(given.sizes)
    axes = draw.permutation(rank)[: number(draw, 0, rank + 1)].astype(np.int32)
    return op(name, axes, draw.random() < 0.5), [given]


@case("ArgMax ArgMin Cumsum Cumprod")
def along_an_axis(name: str, draw: Any) -> Case:
    given = tensor(draw)
    return op(name, number(draw, 0, len(given.sizes))), [given]


@case("MatMul BatchMatMulV2 BatchMatMulV3")
def matrix_products(name: str, draw: Any) -> Case:
    m, k, n = sizes_of(draw, 3)
    flags = [bool(flag) for flag in draw.integers(0, 2, 2)]
    batch = () if name == "MatMul" else sizes_of(draw, number(draw, 0, 2))
    sizes = (*batch, *((k, m) if flags[0] else (m, k))), (*batch, *((n, k) if flags[1] else (k, n)))
    summed = [len(batch) + (0 if flags[0] else 1), len(batch) + (1 if flags[1] else 0)]
    if draw.random() < 0.5:  # both have rows along the axis that is summed
        label = rows_of(draw, 0)
        labels = [label._replace(axis=axis) for axis in summed]
    else:
        labels = [any_label(draw, len(sizes[0]), power=True), Label(SAME)]
        if draw.random() < 0.5:
            labels.reverse()
    # rows of one side alone may not be summed with a side that has none
    for side, label in enumerate(labels):
        taken = label.axis == summed[side] or label.axis < len(batch)
        if label.has_rows and not labels[1 - side].has_rows and taken:
            labels[side] = label._replace(axis=2 * len(batch) + 1 - summed[side])
    return op(name, *flags), [*map(Given, labels, sizes)]


@case("Einsum")
def einsums(name: str, draw: Any) -> Case:
    label = rows_of(draw, 0)
    same = Label(SAME)
    choices = [
        ("abc,cd->abd", (2, 3, 4), (4, 5), label._replace(axis=number(draw, 0, 2)), same),
        ("abc,abd->cd", (2, 3, 4), (2, 3, 5), label, label),
        ("abc,abd->acd", (2, 3, 4), (2, 3, 5), label, label),
        ("...c,cd->...d", (2, 3, 4), (4, 5), label, same),
        ("ab,bc->ac", (2, 3), (3, 4), Label(SUM), same),
        ("ab,cb->ac", (2, 3), (4, 3), label, label),
    ]
    equation, first, second, *labels = choices[number(draw, 0, len(choices))]
    return op(name, equation), [Given(labels[0], first), Given(labels[1], second)]


@case(
    "Conv2D Conv2DBackpropInput Conv2DBackpropFilter DepthwiseConv2dNative "
    "DepthwiseConv2dNativeBackpropInput DepthwiseConv2dNativeBackpropFilter "
    "Conv3D Conv3DBackpropInputV2 Conv3DBackpropFilterV2"
)
def convolutions(name: str, draw: Any) -> Case:
    axes = 3 if "3D" in name else 2
    label = rows_of(draw, 0, power=True)
    options = {"strides": [1] * (axes + 2), "padding": "SAME"}
    x = Given(label, (2, *[4] * axes, 3))
    outputs = Given(label._replace(power=0), (2, *[4] * axes, 6))
    filters = Given(Label(SAME), (*[3] * axes, 3, 2 if name.startswith("Depthwise") else 6))
    if "Input" in name:
        return op(name, input_sizes=x.shape, **options), [filters, outputs]
    if "Filter" in name:
        return op(name, filter_sizes=filters.sizes, **options), [x, outputs]
    return op(name, **options), [x if draw.random() < 0.7 else Given(Label(SUM), x.sizes), filters]


@case(
    "MaxPool MaxPoolGrad MaxPoolGradGrad AvgPool AvgPoolGrad "
    "MaxPool3D MaxPool3DGrad AvgPool3D AvgPool3DGrad"
)
def pools(name: str, draw: Any) -> Case:
    axes = 3 if "3D" in name else 2
    label = rows_of(draw, 0, power=name not in ("MaxPool", "MaxPool3D"))
    window = [1, *[2] * axes, 1]
    options = {"ksize": window, "strides": window, "padding": "SAME"}
    x = Given(label, (2, *[4] * axes, 3), tf.float32)
    small = Given(label, (2, *[2] * axes, 3), tf.float32)
    if name.startswith("AvgPool") and name.endswith("Grad"):
        return op(name, orig_input_shape=x.shape, **options), [small]
    if name.endswith("Grad"):
        largest = op(name.replace("Grad", ""), **options)
        plain = Given(label._replace(power=0), x.sizes, tf.float32)
        return lambda rows, x, g: op(name, **options)(rows, x, largest(rows, x), g), [
            plain,
            x if name.endswith("GradGrad") else small,
        ]
    if name.startswith("AvgPool") and draw.random() < 0.3:
        x = Given(Label(SUM), x.sizes, tf.float32)
    return op(name, **options), [x]


_OF_IMAGES: dict[str, list[Any]] = {
    "RGBToHSV": [],
    "HSVToRGB": [],
    "ResizeBilinear": [[3, 5]],
    "ResizeBicubic": [[3, 5]],
    "ResizeNearestNeighbor": [[3, 5]],
    "ResizeBilinearGrad": [],
    "ResizeBicubicGrad": [],
    "ResizeNearestNeighborGrad": [[2, 2]],
    "SpaceToDepth": [2],
    "DepthToSpace": [2],
    "AdjustContrastv2": [2.0],
    "AdjustHue": [0.1],
    "AdjustSaturation": [1.5],
    "ExtractImagePatches": [[1, 2, 2, 1], [1, 1, 1, 1], [1, 1, 1, 1], "SAME"],
}


@case(" ".join(_OF_IMAGES))
def images(name: str, draw: Any) -> Case:
    moved = name in ("SpaceToDepth", "DepthToSpace")
    label = rows_of(draw, 0, power=moved)
    if name == "SpaceToDepth" and draw.random() < 0.3:
        label = Label(SUM)
    x = Given(label, (2, 4, 4, 4 if moved else 3), tf.float32)
    small = Given(label, (2, 2, 2, 3), tf.float32)
    two = name in ("ResizeBilinearGrad", "ResizeBicubicGrad")
    return op(name, *_OF_IMAGES[name]), [x, small] if two else [x]


@case("ImageProjectiveTransformV3")
def transforms(name: str, draw: Any) -> Case:
    label = rows_of(draw, 0)
    own = (label, (2, 8)) if draw.random() < 0.5 else (Label(SAME), (1, 8))
    call = op(name, [4, 4], 0.0, interpolation="BILINEAR")
    return call, [Given(label, (2, 4, 4, 3)), Given(*own, tf.float32)]


@case("InTopKV2 SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits DenseBincount")
def classes(name: str, draw: Any) -> Case:
    label = rows_of(draw, 0)
    scores = Given(label, (2, 4))
    labels = Given(label, (2,), tf.int32, 0, 4)
    if name == "DenseBincount":
        many = Given(label, (2, 3), tf.int32, 0, 4) if draw.random() < 0.5 else labels
        return op(name, 4, np.zeros(0)), [many]
    if name == "InTopKV2":
        return op(name, 2), [scores, labels]
    return op(name), [scores, labels if name.startswith("Sparse") else scores]


@case(
    "Softmax LogSoftmax FFT IFFT RFFT IRFFT TopKV2 Cholesky MatrixInverse MatrixDeterminant "
    "MatrixBandPart Svd Qr SelfAdjointEigV2 LogMatrixDeterminant"
)
def trailing(name: str, draw: Any) -> Case:
    flat = name in ("Softmax", "LogSoftmax")
    label = any_label(draw, 2 if flat else 3)
    if draw.random() < 0.7 or (
        label.has_rows and not flat and name not in ("TopKV2", "FFT", "RFFT")
    ):
        label = label._replace(axis=0)
    return op(name), [Given(label, (2, 3) if flat else (2, 3, 3))]


@case("BiasAdd BiasAddGrad")
def biases(name: str, draw: Any) -> Case:
    label = any_label(draw, 3, power=True)
    if label.has_rows and label.axis == 2:
        label = label._replace(axis=0)
    x = Given(label, (2, 3, 4))
    bias = Given(Label(SAME, power=label.power + (label.kind == SUM)), (4,))
    return op(name), [x] if name == "BiasAddGrad" else [x, bias]


@case("Reshape")
def reshapes(name: str, draw: Any) -> Case:
    label = Label(SUM) if draw.random() < 0.2 else rows_of(draw, number(draw, 0, 3), power=True)
    x = tensor(draw, 3, label)
    chosen = number(draw, 0, 8)

    def shape(rows: int) -> list[int]:
        a, b, c = x.shape(rows)
        targets = [
            [a * b, c],
            [a, b * c],
            [a * b * c],
            [a, 1, b, c],
            [-1, c],
            [1, a, b, c],
            [b, a, c],
            [rows, -1] if label.has_rows and label.axis == 0 else [a, b, c, 1],
        ]
        return targets[chosen]

    return op(name, shape), [x]


@case("Transpose ExpandDims Squeeze")
def axes(name: str, draw: Any) -> Case:
    x = tensor(draw, 3)
    if name == "Transpose":
        return op(name, [int(place) for place in draw.permutation(3)]), [x]
    if name == "ExpandDims":
        return op(name, number(draw, 0, 4)), [x]
    at = number(draw, 0, 3)
    label = x.label._replace(axis=(at + 1) % 3) if x.label.axis == at else x.label
    sizes = tuple(1 if place == at else size for place, size in enumerate(x.sizes))
    return op(name, [at] if draw.random() < 0.5 else []), [Given(label, sizes)]


@case("Fill BroadcastTo Tile")
def repeats(name: str, draw: Any) -> Case:
    if name == "Fill":
        by_row = draw.random() < 0.5
        call = op(name, dims=lambda rows: [3, rows if by_row else 2])
        return call, [tensor(draw, 0, Label(SAME, power=1))]
    label = any_label(draw, 2, power=True)
    if name == "BroadcastTo" and label.has_rows:
        label = label._replace(axis=0)
    x = Given(label, (1, 3))
    scaled = not label.has_rows and draw.random() < 0.5
    if name == "BroadcastTo":
        return op(name, lambda rows: [2, rows if scaled else x.shape(rows)[0], 3]), [x]
    times = [number(draw, 1, 3), number(draw, 1, 3)]
    return op(name, lambda rows: [rows if scaled else times[0], times[1]]), [x]


@case("Unpack Split SplitV")
def cuts(name: str, draw: Any) -> Case:
    axis = number(draw, 0, 2)
    label = any_label(draw, 2, power=True)
    if name == "Unpack":
        axis = 1 - label.axis if label.has_rows else axis
        return op(name, num=4, axis=axis), [Given(label, (4, 4))]
    if label.has_rows and draw.random() < 0.6:
        label = Label(ROWS, axis, 2, label.inner, label.power)
    along = label.has_rows and label.axis == axis
    if name == "Split":
        if along and label.blocks * label.inner == 1:
            label = label._replace(blocks=2, kind=ROWS)
        return op(name, axis=axis, num_split=2), [Given(label, (4, 4))]
    x = Given(label, (4, 4))
    first = draw.random() < 0.5

    def sizes(rows: int) -> list[int]:
        total = x.shape(rows)[axis]
        cut = total // 2 if first else 1
        return [cut, total - cut]

    return op(name, sizes, axis=axis, num_split=2), [x]


@case("ConcatV2")
def joins(name: str, draw: Any) -> Case:
    axis = number(draw, 0, 2)
    label = any_label(draw, 2, power=True)
    second = label
    if label.kind == ROWS and label.axis == axis:
        second = label._replace(blocks=number(draw, 1, 3))
    elif label.kind == SUM:
        second = Label(SAME, power=label.power + 1)
    return op(name, axis), [Given(each, (3, 3)) for each in (label, second, label)]


@case("Slice StridedSlice StridedSliceGrad")
def slices(name: str, draw: Any) -> Case:
    axis = number(draw, 0, 2)
    label = any_label(draw, 2, power=True)
    if draw.random() < 0.5:
        label = Label(ROWS, axis, 2, number(draw, 1, 3), label.power)
    along = label.has_rows and label.axis == axis
    unit = label.inner if label.kind == ROWS else 1
    bounds = [(1, 2), (0, 1), (0, 2)][number(draw, 0, 3)]
    if along and label.blocks == 1 and name != "StridedSliceGrad":
        bounds = (0, 1)
    if along and name == "StridedSliceGrad":
        label = Label(ROWS, axis, 2, unit, label.power)
    first, last = bounds
    x = Given(label, (4, 4))

    def place(at: int, rows: int, other: int = 0) -> list[int]:
        length = at * unit * rows if along else at
        return [other, length] if axis else [length, other]

    if name == "Slice":
        return op(
            name,
            lambda rows: place(first, rows),
            lambda rows: place(last - first, rows, x.shape(rows)[1 - axis]),
        ), [x]
    ends = {
        "begin": lambda rows: place(first, rows),
        "end": lambda rows: place(last, rows),
        "strides": [1, 1],
        "ellipsis_mask" if axis else "end_mask": 1 if axis else 2,
    }
    if name == "StridedSlice":
        return op(name, **ends), [x]
    inside = label._replace(blocks=last - first) if along else label
    sizes = (4, last - first) if axis else (last - first, 4)
    return op(name, shape=x.shape, **ends), [Given(inside, sizes)]


@case("Pad PadV2 MirrorPad MirrorPadGrad")
def pads(name: str, draw: Any) -> Case:
    label = any_label(draw, 2, power=True)
    axis = number(draw, 0, 2)
    along = name == "Pad" and label.kind == ROWS and label.axis == axis

    def around(rows: int) -> list[list[int]]:
        size = label.inner * rows if along else 1
        return [[size, size] if place == axis else [0, 0] for place in range(2)]

    return op(name, around), [Given(label, (4, 4))]


@case("ReverseV2 Roll")
def turns(name: str, draw: Any) -> Case:
    x = tensor(draw, 2)
    axis = [number(draw, 0, 2)]
    return op(name, *([[1], axis] if name == "Roll" else [axis])), [x]


def of_one_number(places: Given) -> Given:
    return replace(places, sizes=(*places.sizes, 1))


@case("GatherV2 GatherNd UnsortedSegmentSum ScatterNd OneHot")
def numbers(name: str, draw: Any) -> Case:
    label = rows_of(draw, 0)
    places = Given(label, (2, 3) if draw.random() < 0.5 else (2,), tf.int32, 0, 4)
    same = Given(Label(SAME), (2, 3), tf.int32, 0, 4)
    table = Given(Label(SAME, power=number(draw, -1, 2)), (4, 4))
    axis = number(draw, 0, 2)
    if name == "GatherV2":
        across = Given(rows_of(draw, 1 - axis, power=True), (4, 4))
        pairs = [(table, places), (Given(Label(SUM), (4, 4)), same), (across, same)]
        kind = number(draw, 0, 4)
        if kind < len(pairs):
            return op(name, axis), [*pairs[kind]]
        batch = Given(label, (2, 4)), Given(label, (2, 3), tf.int32, 0, 4)
        return op(name, 1, batch_dims=1), [*batch]
    if name == "GatherNd":
        return op(name), [table, of_one_number(places)]
    if name == "OneHot":
        return op(name, 5, 1.0, 0.0, axis=number(draw, -1, 2)), [places]
    later = Given(rows_of(draw, 2), (2, 3, 2))
    values = Given(label._replace(power=table.label.power), (*places.sizes, 3))
    by_row = draw.random() < 0.7
    x, at = (values, places) if by_row else (later, same)
    if name == "UnsortedSegmentSum":
        return op(name, 4), [x, at]
    return op(name, lambda rows: [4, x.shape(rows)[-1]]), [of_one_number(at), x]


@case(
    "Where Unique UniqueV2 UniqueWithCounts DynamicPartition NonMaxSuppressionV3 SegmentSum"
    " SegmentMean"
)
def lengths(name: str, draw: Any) -> Case:
    label = Label(SAME) if draw.random() < 0.5 else rows_of(draw, 0)
    build: dict[str, Any] = {
        "UniqueV2": op("UniqueV2", [0]),
        "DynamicPartition": lambda rows, x: op(name, 3)(rows, x, x),
        "NonMaxSuppressionV3": lambda rows, x: op(name, 2, 0.5, 0.1)(
            rows, tf.stack([to_float32(x)] * 4, 1), to_float32(x)
        ),
        "SegmentSum": lambda rows, x: op(name)(rows, x, x * 0),
        "SegmentMean": lambda rows, x: op(name)(rows, x, x * 0),
    }
    return build.get(name) or op(name), [Given(label, (4,), tf.int32, 0, 3)]


@case(
    "TensorListReserve EmptyTensorList TensorListFromTensor TensorListStack TensorListSetItem "
    "TensorListPushBack TensorListGetItem TensorListPopBack TensorListLength "
    "TensorListElementShape"
)
def lists(name: str, draw: Any) -> Case:
    label = any_label(draw, 3, power=True)
    if label.has_rows and label.axis == 0:
        label = label._replace(axis=1)

    def build(rows: int, x: Any) -> Any:
        shape = x.shape[1:]
        held = raw.TensorListFromTensor(tensor=x, element_shape=shape)
        of = {"element_shape": shape, "element_dtype": x.dtype}
        item = raw.TensorListGetItem(input_handle=held, index=1, **of)
        made = raw.TensorListReserve(num_elements=2, **of)
        made = raw.TensorListSetItem(input_handle=made, index=0, item=item)
        stack = raw.TensorListStack(input_handle=made, **of)
        empty = raw.EmptyTensorList(max_num_elements=4, **of)
        pushed = raw.TensorListPushBack(input_handle=empty, tensor=item)
        _, popped = raw.TensorListPopBack(input_handle=pushed, **of)
        length = raw.TensorListLength(input_handle=made)
        return (
            item,
            stack,
            popped,
            length,
            raw.TensorListElementShape(input_handle=made, shape_type=tf.int32),
        )

    return build, [Given(label, (3, 3, 3))]


@case(
    "StaticRegexReplace AsString StringLower StringUpper StringToHashBucketFast LookupTableFindV2"
)
def texts(name: str, draw: Any) -> Case:
    x = Given(rows_of(draw, 0), (4, 2), tf.int64, 0, 9)
    # of a table: tests/trainer/run/test_proof.py
    return op("AsString" if name == "LookupTableFindV2" else name), [x]


@case("Range")
def ranges(name: str, draw: Any) -> Case:
    """Draws what counts rows, and takes or adds up values by these places."""
    longer = draw.random() < 0.5
    step = number(draw, 1, 4)

    def build(rows: int, x: Any, column: Any) -> Any:
        row = tf.range(rows)
        places = row[:, None] * 4 + column
        index = tf.stack([row, column[:, 0]], 1)
        joined = tf.concat([row[:, None], column[:, :1]], 1)
        flat = tf.reshape(places, [-1])
        with tf.name_scope("gradient_tape"):
            scattered = tf.scatter_nd(flat[:, None], tf.reshape(x[:, :3], [-1]), [rows * 4])
            summed = tf.math.unsorted_segment_sum(x[:, :3], places, rows * 4)
        return (
            tf.range(0, (step if longer else rows) * step, step),
            tf.range(1, rows * step + 1),
            raw.Range(start=0.0, limit=rows if longer else 2.0, delta=0.5),
            tf.cast(places, tf.int64),
            flat,
            index,
            joined,
            tf.gather_nd(x, index),
            tf.scatter_nd(joined, x[:, 0], [rows, 4]),
            scattered,
            summed,
        )

    label = Label(ROWS)
    return build, [Given(label, (1, 4)), Given(label, (1, 3), tf.int32, 0, 4)]
