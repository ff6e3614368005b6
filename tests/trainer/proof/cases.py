"""Draws calls of every operation that has a rule: shapes, axes, and what the inputs are to the
whole batch."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import tensorflow as tf

from tests.trainer.proof.halves import Given
from trainer.proof.arithmetic import RULES, broadcast
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


def rows_of(draw: Any, axis: int, *, batches: bool = True, power: bool = False) -> Label:
    """Draws a label of rows along an axis."""
    blocks, inner = (int(draw.integers(1, 3)) if batches else 1 for _ in range(2))
    return Label(ROWS, axis, blocks, inner, int(draw.integers(-1, 2)) if power else 0)


def any_label(draw: Any, rank: int, **options: Any) -> Label:
    """Draws any label of a tensor with so many axes."""
    kind = draw.choice([SAME, ROWS, ROWS, UNIFORM, SUM])
    options["power"] = options.get("power", False) and draw.random() < 0.4
    if kind in (SAME, SUM) or not rank:
        return Label(
            str(kind) if rank else SAME,
            power=int(draw.integers(-1, 2)) if options.get("power") else 0,
        )
    label = rows_of(draw, int(draw.integers(0, rank)), **options)
    return label if kind == ROWS else label._replace(kind=UNIFORM, blocks=1, inner=1)


def sizes_of(draw: Any, rank: int) -> tuple[int, ...]:
    return tuple(int(size) for size in draw.integers(2, 5, rank))


def tensor(draw: Any, rank: int | None = None, label: Label | None = None, **options: Any) -> Given:
    rank = int(draw.integers(1, 4)) if rank is None else rank
    return Given(label or any_label(draw, rank, power=True), sizes_of(draw, rank), **options)


def together(
    draw: Any, count: int, *, power: bool, broadcasts: bool = True, **options: Any
) -> list[Given]:
    """Draws inputs of one shape, or of one that broadcasts."""
    rank = int(draw.integers(1, 4))
    sizes = sizes_of(draw, rank)
    label = any_label(draw, rank, power=power)
    inputs = []
    for _ in range(count):
        own = label
        if label.kind == SUM:
            own = Label(
                str(draw.choice([SUM, SAME])),
                power=label.power + int(draw.integers(0, 2)) if power else 0,
            )
        elif power and draw.random() < 0.3:
            own = label._replace(power=int(draw.integers(-1, 2)))
        inputs.append(Given(own, sizes, **options))
        if label.has_rows and len(inputs) > 1 and broadcasts and draw.random() < 0.5:
            narrow = tuple(1 if axis == label.axis else size for axis, size in enumerate(sizes))
            inputs[-1] = Given(Label(SAME, power=own.power), narrow, **options)
    return inputs


_KINDS = {
    **{
        name: {"dtype": tf.bool} for name in ["LogicalAnd", "LogicalNot", "LogicalOr", "All", "Any"]
    },
    **{
        name: {"dtype": tf.int32, "low": 0, "high": 5}
        for name in ["BitwiseAnd", "BitwiseOr", "BitwiseXor", "RightShift", "LeftShift", "Invert"]
    },
    "Acosh": {"low": 1.1, "high": 3.0},
}


_ELSEWHERE = {"StaticRegexReplace", "Select", "SelectV2"}
_ELEMENTWISE = [name for name, of in RULES.items() if getattr(of, "__wrapped__", None) is broadcast]


@case(
    " ".join(
        [name for name in _ELEMENTWISE if not name.endswith("Grad") and name not in _ELSEWHERE]
    )
)
@case("RealDiv DivNoNan Sign")
def value_by_value(name: str, draw: Any) -> Case:
    function = getattr(raw, name)
    names = [
        each
        for each in inspect.signature(function).parameters
        if each
        in (
            "x",
            "y",
            "x1",
            "x2",
            "features",
            "a",
            "b",
            "q",
            "clip_value_min",
            "clip_value_max",
            "t",
            "input",
        )
    ]
    broadcasts = name != "ClipByValue"
    inputs = together(draw, len(names), power=True, broadcasts=broadcasts, **_KINDS.get(name, {}))
    extra = {"type": tf.int64} if name == "Bitcast" else {}
    return lambda rows, *given: function(**dict(zip(names, given, strict=True)), **extra), inputs


@case(" ".join(name for name in _ELEMENTWISE if name.endswith("Grad")))
def gradients(name: str, draw: Any) -> Case:
    function = getattr(raw, name)
    names = [*inspect.signature(function).parameters][:2]
    inputs = together(draw, 2, power=True)
    same = [
        Given(each.label, inputs[0].sizes) if each.sizes == inputs[0].sizes else inputs[0]
        for each in inputs
    ]
    return lambda rows, *given: function(**dict(zip(names, given, strict=True))), same


@case(
    "Identity StopGradient PreventGradient Snapshot Neg CheckNumerics ZerosLike OnesLike Square"
    " L2Loss"
)
def of_one(name: str, draw: Any) -> Case:
    function = getattr(raw, name)
    parameters = [*inspect.signature(function).parameters]
    extra = {"message": "m"} if "message" in parameters and name == "CheckNumerics" else {}
    return lambda rows, given: function(**{parameters[0]: given}, **extra), [tensor(draw)]


@case("AddN IdentityN SquaredDifference Pack")
def of_several(name: str, draw: Any) -> Case:
    inputs = together(draw, 2 if name == "SquaredDifference" else 3, power=True)
    if name != "SquaredDifference":
        inputs = [
            Given(each.label if each.sizes == inputs[0].sizes else inputs[0].label, inputs[0].sizes)
            for each in inputs
        ]
    axis = int(draw.integers(0, len(inputs[0].sizes) + 1))
    build = {
        "AddN": lambda rows, *given: raw.AddN(inputs=given),
        "IdentityN": lambda rows, *given: raw.IdentityN(input=given),
        "SquaredDifference": lambda rows, *given: raw.SquaredDifference(x=given[0], y=given[1]),
        "Pack": lambda rows, *given: raw.Pack(values=given, axis=axis),
    }
    return build[name], inputs


@case("Real Imag")
def complex_parts(name: str, draw: Any) -> Case:
    function = getattr(raw, name)
    return lambda rows, x: function(input=tf.cast(x, tf.complex64)), [tensor(draw)]


@case("EnsureShape PlaceholderWithDefault")
def shapes(name: str, draw: Any) -> Case:
    given = tensor(draw)
    build = {
        "EnsureShape": lambda rows, x: raw.EnsureShape(input=x, shape=[None] * len(x.shape)),
        "PlaceholderWithDefault": lambda rows, x: raw.PlaceholderWithDefault(
            input=x, shape=[None] * len(x.shape)
        ),
    }
    return build[name], [given]


@case("Cast")
def casts(name: str, draw: Any) -> Case:
    to = [tf.float32, tf.int32, tf.bool][int(draw.integers(0, 3))]
    return lambda rows, x: raw.Cast(x=x, DstT=to), [tensor(draw)]


@case("Select SelectV2")
def selections(name: str, draw: Any) -> Case:
    first, second, third = together(draw, 3, power=True)
    condition = Given(
        first.label._replace(power=0, kind=SAME if first.label.kind == SUM else first.label.kind),
        first.sizes,
        tf.bool,
    )
    if name == "Select":
        others = [
            Given(each.label, first.sizes) if each.sizes == first.sizes else first
            for each in (second, third)
        ]
        return lambda rows, c, x, y: raw.Select(condition=c, x=x, y=y), [condition, *others]
    return lambda rows, c, x, y: raw.SelectV2(condition=c, t=x, e=y), [condition, second, third]


@case("Sum Mean Max Min Prod All Any EuclideanNorm")
def reductions(name: str, draw: Any) -> Case:
    given = tensor(draw, **_KINDS.get(name, {}))
    rank = len(given.sizes)
    axes = [int(axis) for axis in draw.permutation(rank)[: int(draw.integers(0, rank + 1))]]
    keep = bool(draw.random() < 0.5)
    return lambda rows, x: getattr(raw, name)(
        input=x, axis=tf.constant(axes, tf.int32), keep_dims=keep
    ), [given]


@case("ArgMax ArgMin Cumsum Cumprod")
def along_an_axis(name: str, draw: Any) -> Case:
    given = tensor(draw)
    axis = int(draw.integers(0, len(given.sizes)))
    if name.startswith("Arg"):
        return lambda rows, x: getattr(raw, name)(input=x, dimension=axis), [given]
    return lambda rows, x: getattr(raw, name)(x=x, axis=axis), [given]


@case("MatMul BatchMatMulV2 BatchMatMulV3")
def matrix_products(name: str, draw: Any) -> Case:
    m, k, n = (int(size) for size in draw.integers(2, 5, 3))
    flags = [bool(flag) for flag in draw.integers(0, 2, 2)]
    batch = () if name == "MatMul" else sizes_of(draw, int(draw.integers(0, 2)))
    first = (*batch, *((k, m) if flags[0] else (m, k)))
    second = (*batch, *((n, k) if flags[1] else (k, n)))
    if draw.random() < 0.5:  # both have rows along the axis that is summed
        axes = [len(batch) + (0 if flags[0] else 1), len(batch) + (1 if flags[1] else 0)]
        label = rows_of(draw, 0)
        labels = [label._replace(axis=axis) for axis in axes]
    elif draw.random() < 0.5:
        labels = [any_label(draw, len(first), power=True), Label(SAME)]
    else:
        labels = [Label(SAME), any_label(draw, len(second), power=True)]

    def build(rows: int, x: Any, y: Any) -> Any:
        if name == "MatMul":
            return raw.MatMul(a=x, b=y, transpose_a=flags[0], transpose_b=flags[1])
        extra = {"Tout": x.dtype} if name == "BatchMatMulV3" else {}
        return getattr(raw, name)(x=x, y=y, adj_x=flags[0], adj_y=flags[1], **extra)

    summed = [len(batch) + (0 if flags[0] else 1), len(batch) + (1 if flags[1] else 0)]
    # rows of one side alone may not be summed with a side that has none
    for number, label in enumerate(labels):
        other = labels[1 - number]
        if (
            label.has_rows
            and not other.has_rows
            and (label.axis == summed[number] or label.axis < len(batch))
        ):
            labels[number] = label._replace(axis=2 * len(batch) + 1 - summed[number])
    return build, [Given(labels[0], first), Given(labels[1], second)]


@case("Einsum")
def einsums(name: str, draw: Any) -> Case:
    label = rows_of(draw, 0)
    choices = [
        (
            "abc,cd->abd",
            (2, 3, 4),
            (4, 5),
            label._replace(axis=int(draw.integers(0, 2))),
            Label(SAME),
        ),
        ("abc,abd->cd", (2, 3, 4), (2, 3, 5), label, label),
        ("abc,abd->acd", (2, 3, 4), (2, 3, 5), label, label),
        ("...c,cd->...d", (2, 3, 4), (4, 5), label, Label(SAME)),
        ("ab,bc->ac", (2, 3), (3, 4), Label(SUM), Label(SAME)),
        ("ab,cb->ac", (2, 3), (4, 3), label, label),
    ]
    equation, first, second, *labels = choices[int(draw.integers(0, len(choices)))]
    return lambda rows, x, y: raw.Einsum(inputs=[x, y], equation=equation), [
        Given(labels[0], first),
        Given(labels[1], second),
    ]


def _batch(draw: Any) -> Label:
    return rows_of(draw, 0, power=True)


@case(
    "Conv2D Conv2DBackpropInput Conv2DBackpropFilter DepthwiseConv2dNative "
    "DepthwiseConv2dNativeBackpropInput DepthwiseConv2dNativeBackpropFilter"
)
def convolutions(name: str, draw: Any) -> Case:
    label = _batch(draw)
    options = {"strides": [1, 1, 1, 1], "padding": "SAME"}
    depthwise = name.startswith("Depthwise")
    images = Given(label, (2, 4, 4, 3))
    outputs = Given(label._replace(power=0), (2, 4, 4, 6))
    filters = Given(Label(SAME), (3, 3, 3, 2 if depthwise else 6))
    function = getattr(raw, name)
    if name.endswith("Input"):
        count = label.blocks * label.inner
        return lambda rows, w, dy: function(
            input_sizes=[count * rows, 4, 4, 3], filter=w, out_backprop=dy, **options
        ), [filters, outputs]
    if name.endswith("Filter"):
        return lambda rows, x, dy: function(
            input=x, filter_sizes=filters.sizes, out_backprop=dy, **options
        ), [
            images,
            outputs,
        ]
    kind = images if draw.random() < 0.7 else Given(Label(SUM), (2, 4, 4, 3))
    return lambda rows, x, w: function(input=x, filter=w, **options), [kind, filters]


@case("Conv3D Conv3DBackpropInputV2 Conv3DBackpropFilterV2")
def volumes(name: str, draw: Any) -> Case:
    label = _batch(draw)
    options = {"strides": [1, 1, 1, 1, 1], "padding": "SAME"}
    images = Given(label, (2, 3, 3, 3, 2))
    filters = Given(Label(SAME), (2, 2, 2, 2, 3))
    outputs = Given(label._replace(power=0), (2, 3, 3, 3, 3))
    count = label.blocks * label.inner
    if name == "Conv3DBackpropInputV2":
        return lambda rows, w, dy: raw.Conv3DBackpropInputV2(
            input_sizes=[count * rows, 3, 3, 3, 2], filter=w, out_backprop=dy, **options
        ), [filters, outputs]
    if name == "Conv3DBackpropFilterV2":
        return lambda rows, x, dy: raw.Conv3DBackpropFilterV2(
            input=x, filter_sizes=filters.sizes, out_backprop=dy, **options
        ), [images, outputs]
    return lambda rows, x, w: raw.Conv3D(input=x, filter=w, **options), [images, filters]


_WINDOW = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "SAME"}
_CUBE = {"ksize": [1, 2, 2, 2, 1], "strides": [1, 2, 2, 2, 1], "padding": "SAME"}


@case(
    "MaxPool AvgPool MaxPoolGrad MaxPoolGradGrad AvgPoolGrad RGBToHSV HSVToRGB "
    "ResizeBilinear ResizeBicubic ResizeNearestNeighbor ResizeBilinearGrad "
    "ResizeBicubicGrad ResizeNearestNeighborGrad SpaceToDepth DepthToSpace "
    "AdjustContrastv2 AdjustHue AdjustSaturation"
)
def images(name: str, draw: Any) -> Case:
    label = _batch(draw)
    kind = tf.float32
    if name not in (
        "AvgPool",
        "AvgPoolGrad",
        "MaxPoolGrad",
        "MaxPoolGradGrad",
        "SpaceToDepth",
        "DepthToSpace",
    ):
        label = label._replace(power=0)
    channels = 4 if name == "DepthToSpace" else 3
    x = Given(label, (2, 4, 4, channels), kind)
    plain = Given(label._replace(power=0), (2, 4, 4, channels), kind)
    small = Given(label, (2, 2, 2, channels), kind)
    count = label.blocks * label.inner
    if name in ("AvgPool", "SpaceToDepth") and draw.random() < 0.3:
        x = Given(Label(SUM), (2, 4, 4, channels), kind)
    one: dict[str, Any] = {
        "MaxPool": lambda rows, x: raw.MaxPool(input=x, **_WINDOW),
        "AvgPool": lambda rows, x: raw.AvgPool(value=x, **_WINDOW),
        "RGBToHSV": lambda rows, x: raw.RGBToHSV(images=x),
        "HSVToRGB": lambda rows, x: raw.HSVToRGB(images=x),
        "SpaceToDepth": lambda rows, x: raw.SpaceToDepth(input=x, block_size=2),
        "DepthToSpace": lambda rows, x: raw.DepthToSpace(input=x, block_size=2),
        "AdjustContrastv2": lambda rows, x: raw.AdjustContrastv2(images=x, contrast_factor=2.0),
        "AdjustHue": lambda rows, x: raw.AdjustHue(images=x, delta=0.1),
        "AdjustSaturation": lambda rows, x: raw.AdjustSaturation(images=x, scale=1.5),
    }
    if name in one:
        return one[name], [x]
    if name.startswith("Resize"):
        if name.endswith("Grad"):
            if name == "ResizeNearestNeighborGrad":
                return lambda rows, g: raw.ResizeNearestNeighborGrad(grads=g, size=[2, 2]), [x]
            return lambda rows, g, x: getattr(raw, name)(grads=g, original_image=x), [
                x,
                Given(plain.label, (2, 2, 2, channels), kind),
            ]
        return lambda rows, x: getattr(raw, name)(images=x, size=[3, 5]), [x]
    if name == "AvgPoolGrad":
        return lambda rows, g: raw.AvgPoolGrad(
            orig_input_shape=[count * rows, 4, 4, channels], grad=g, **_WINDOW
        ), [small]
    if name == "MaxPoolGrad":
        return lambda rows, x, g: raw.MaxPoolGrad(
            orig_input=x, orig_output=raw.MaxPool(input=x, **_WINDOW), grad=g, **_WINDOW
        ), [plain, small]
    return lambda rows, x, g: raw.MaxPoolGradGrad(
        orig_input=x, orig_output=raw.MaxPool(input=x, **_WINDOW), grad=g, **_WINDOW
    ), [plain, x]


@case("MaxPool3D AvgPool3D MaxPool3DGrad AvgPool3DGrad")
def cubes(name: str, draw: Any) -> Case:
    label = rows_of(draw, 0)
    x = Given(label, (2, 4, 4, 4, 2), tf.float32)
    small = Given(label, (2, 2, 2, 2, 2), tf.float32)
    count = label.blocks * label.inner
    if name == "AvgPool3DGrad":
        return lambda rows, g: raw.AvgPool3DGrad(
            orig_input_shape=[count * rows, 4, 4, 4, 2], grad=g, **_CUBE
        ), [small]
    if name == "MaxPool3DGrad":
        return lambda rows, x, g: raw.MaxPool3DGrad(
            orig_input=x, orig_output=raw.MaxPool3D(input=x, **_CUBE), grad=g, **_CUBE
        ), [x, small]
    return lambda rows, x: getattr(raw, name)(input=x, **_CUBE), [x]


@case("ImageProjectiveTransformV3")
def transforms(name: str, draw: Any) -> Case:
    label = rows_of(draw, 0)
    own = Given(label, (2, 8)) if draw.random() < 0.5 else Given(Label(SAME), (1, 8))

    def build(rows: int, x: Any, t: Any) -> Any:
        return getattr(raw, name)(
            images=x,
            transforms=tf.cast(t, tf.float32),
            output_shape=[4, 4],
            interpolation="BILINEAR",
            fill_value=0.0,
        )

    return build, [Given(label, (2, 4, 4, 3)), own]


@case("InTopKV2 SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits DenseBincount")
def classes(name: str, draw: Any) -> Case:
    label = rows_of(draw, 0)
    scores = Given(label, (2, 4))
    numbers = Given(label, (2,), tf.int32, 0, 4)
    if name == "InTopKV2":
        return lambda rows, x, y: raw.InTopKV2(
            predictions=tf.cast(x, tf.float32), targets=y, k=2
        ), [scores, numbers]
    if name == "DenseBincount":
        many = Given(label, (2, 3), tf.int32, 0, 4) if draw.random() < 0.5 else numbers
        return lambda rows, x: raw.DenseBincount(
            input=x, size=4, weights=tf.constant([], tf.float64)
        ), [many]
    if name.startswith("Sparse"):
        return lambda rows, x, y: raw.SparseSoftmaxCrossEntropyWithLogits(features=x, labels=y), [
            scores,
            numbers,
        ]
    return lambda rows, x, y: raw.SoftmaxCrossEntropyWithLogits(features=x, labels=y), [
        scores,
        scores,
    ]


@case(
    "Softmax LogSoftmax FFT IFFT RFFT IRFFT TopKV2 Cholesky MatrixInverse MatrixDeterminant "
    "MatrixBandPart Svd Qr SelfAdjointEigV2 LogMatrixDeterminant"
)
def trailing(name: str, draw: Any) -> Case:
    label = any_label(draw, 2 if name in ("Softmax", "LogSoftmax") else 3)
    label = label._replace(axis=0) if draw.random() < 0.7 else label
    x = Given(label, (2, 3) if name in ("Softmax", "LogSoftmax") else (2, 3, 3))
    if (
        label.has_rows
        and label.axis
        and name not in ("Softmax", "LogSoftmax", "TopKV2", "FFT", "RFFT")
    ):
        x = Given(label._replace(axis=0), (2, 3, 3))

    def positive(x: Any) -> Any:
        return tf.matmul(x, x, transpose_b=True) + 3.0 * tf.eye(3, dtype=x.dtype)

    build: dict[str, Any] = {
        "Softmax": lambda rows, x: raw.Softmax(logits=x),
        "LogSoftmax": lambda rows, x: raw.LogSoftmax(logits=x),
        "TopKV2": lambda rows, x: raw.TopKV2(input=x, k=2),
        "Cholesky": lambda rows, x: raw.Cholesky(input=positive(x)),
        "MatrixInverse": lambda rows, x: raw.MatrixInverse(input=positive(x)),
        "MatrixDeterminant": lambda rows, x: raw.MatrixDeterminant(input=positive(x)),
        "LogMatrixDeterminant": lambda rows, x: raw.LogMatrixDeterminant(input=positive(x)),
        "MatrixBandPart": lambda rows, x: raw.MatrixBandPart(input=x, num_lower=0, num_upper=1),
        "Svd": lambda rows, x: raw.Svd(input=positive(x), compute_uv=False)[0],
        "Qr": lambda rows, x: raw.Qr(input=positive(x))[1],
        "SelfAdjointEigV2": lambda rows, x: raw.SelfAdjointEigV2(
            input=positive(x), compute_v=False
        )[0],
        "FFT": lambda rows, x: raw.FFT(input=tf.cast(x, tf.complex64)),
        "IFFT": lambda rows, x: raw.IFFT(input=tf.cast(x, tf.complex64)),
        "RFFT": lambda rows, x: raw.RFFT(input=tf.cast(x, tf.float32), fft_length=[3]),
        "IRFFT": lambda rows, x: raw.IRFFT(input=tf.cast(x, tf.complex64), fft_length=[4]),
    }
    return build[name], [x]


@case("BiasAdd BiasAddGrad")
def biases(name: str, draw: Any) -> Case:
    x = Given(any_label(draw, 3, power=True), (2, 3, 4))
    if x.label.has_rows and x.label.axis == 2:
        x = Given(x.label._replace(axis=0), x.sizes)
    if name == "BiasAddGrad":
        return lambda rows, x: raw.BiasAddGrad(out_backprop=x), [x]
    bias = Given(Label(SAME, power=x.label.power + (x.label.kind == SUM)), (4,))
    return lambda rows, x, b: raw.BiasAdd(value=x, bias=b), [x, bias]


@case("Reshape")
def reshapes(name: str, draw: Any) -> Case:
    x = tensor(
        draw,
        3,
        Label(SUM) if draw.random() < 0.2 else rows_of(draw, int(draw.integers(0, 3)), power=True),
    )
    a, b, c = x.shape(1)
    at = x.label.axis if x.label.has_rows else -1

    def build(rows: int, given: Any) -> Any:
        sizes = [size * (rows if axis == at else 1) for axis, size in enumerate((a, b, c))]
        targets = [
            [sizes[0] * sizes[1], sizes[2]],
            [sizes[0], sizes[1] * sizes[2]],
            [sizes[0] * sizes[1] * sizes[2]],
            [sizes[0], 1, sizes[1], sizes[2]],
            [-1, sizes[2]],
            [1, *sizes],
            [sizes[1], sizes[0], sizes[2]],
            [rows, -1] if at == 0 else [*sizes, 1],
        ]
        return raw.Reshape(tensor=given, shape=targets[chosen])

    chosen = int(draw.integers(0, 8))
    return build, [x]


@case("Transpose ExpandDims Squeeze")
def axes(name: str, draw: Any) -> Case:
    x = tensor(draw, 3)
    order = [int(place) for place in draw.permutation(3)]
    axis = int(draw.integers(0, 4))
    if name == "Transpose":
        return lambda rows, x: raw.Transpose(x=x, perm=order), [x]
    if name == "ExpandDims":
        return lambda rows, x: raw.ExpandDims(input=x, axis=axis), [x]
    at = int(draw.integers(0, 3))
    label = x.label._replace(axis=(at + 1) % 3) if x.label.axis == at else x.label
    sizes = tuple(1 if place == at else size for place, size in enumerate(x.sizes))
    dims = [at] if draw.random() < 0.5 else []
    return lambda rows, x: raw.Squeeze(input=x, axis=dims), [Given(label, sizes)]


@case("Fill BroadcastTo Tile")
def repeats(name: str, draw: Any) -> Case:
    if name == "Fill":
        x = tensor(draw, 0, Label(SAME, power=1))
        by_row = bool(draw.random() < 0.5)
        return lambda rows, x: raw.Fill(dims=[3, rows if by_row else 2], value=x), [x]
    if name == "BroadcastTo":
        label = any_label(draw, 2, power=True)
        label = label._replace(axis=0) if label.has_rows else label
        length = label.blocks * label.inner if label.has_rows else 1
        scaled = not label.has_rows and draw.random() < 0.5
        return lambda rows, x: raw.BroadcastTo(
            input=x, shape=[2, length * (rows if scaled or label.has_rows else 1), 3]
        ), [Given(label, (1, 3))]
    label = any_label(draw, 2, power=True)
    times = [int(time) for time in draw.integers(1, 3, 2)]
    scaled = not label.has_rows and draw.random() < 0.5
    return lambda rows, x: raw.Tile(input=x, multiples=[rows if scaled else times[0], times[1]]), [
        Given(label, (1, 3))
    ]


@case("Unpack Split SplitV")
def cuts(name: str, draw: Any) -> Case:
    axis = int(draw.integers(0, 2))
    label = any_label(draw, 2, power=True)
    sizes = (4, 4)
    if name == "Unpack":
        axis = 1 - label.axis if label.has_rows else axis
        return lambda rows, x: raw.Unpack(value=x, num=4, axis=axis), [Given(label, sizes)]
    if label.has_rows and draw.random() < 0.6:
        label = Label(ROWS, axis, 2, label.inner, label.power)
        axis = axis
    length = label.blocks * label.inner if label.has_rows and label.axis == axis else 0
    if name == "Split":
        return lambda rows, x: raw.Split(axis=axis, value=x, num_split=2), (
            [Given(label, sizes)]
            if length != 1
            else [Given(label._replace(blocks=2, inner=1, kind=ROWS), sizes)]
        )
    first = bool(draw.random() < 0.5)

    def build(rows: int, x: Any) -> Any:
        half = length * rows // 2 if length else 2
        total = length * rows if length else 4
        cut = half if first else 1
        return raw.SplitV(
            value=x, size_splits=tf.constant([cut, total - cut]), axis=axis, num_split=2
        )

    return build, [Given(label, sizes)]


@case("ConcatV2")
def joins(name: str, draw: Any) -> Case:
    axis = int(draw.integers(0, 2))
    label = any_label(draw, 2, power=True)
    second = label
    if label.kind == ROWS and label.axis == axis:
        second = label._replace(blocks=int(draw.integers(1, 3)))
    elif label.kind == SUM:
        second = Label(SAME, power=label.power + 1)
    sizes = (3, 3)
    return lambda rows, *given: raw.ConcatV2(values=given, axis=axis), [
        Given(label, sizes),
        Given(second, sizes),
        Given(label, sizes),
    ]


@case("Slice StridedSlice StridedSliceGrad")
def slices(name: str, draw: Any) -> Case:
    axis = int(draw.integers(0, 2))
    label = any_label(draw, 2, power=True)
    if draw.random() < 0.5:
        label = Label(ROWS, axis, 2, int(draw.integers(1, 3)), label.power)
    whole = (4, 4)
    along = label.has_rows and label.axis == axis
    unit = label.inner if label.kind == ROWS else 1
    bounds = [(1, 2), (0, 1), (0, 2)][int(draw.integers(0, 3))]
    if along and label.blocks == 1 and name != "StridedSliceGrad":
        bounds = (0, 1)

    def ends(rows: int) -> tuple[int, int]:
        return (bounds[0] * unit * rows, bounds[1] * unit * rows) if along else bounds

    def strided(rows: int, function: Any, **given: Any) -> Any:
        begin, end = ends(rows)
        if axis == 0:
            return function(begin=[begin, 0], end=[end, 0], strides=[1, 1], end_mask=2, **given)
        return (
            function(begin=[begin], end=[end], strides=[1], ellipsis_mask=0, **given)
            if False
            else function(begin=[0, begin], end=[0, end], strides=[1, 1], ellipsis_mask=1, **given)
        )

    if name == "Slice":

        def build(rows: int, x: Any) -> Any:
            begin, end = ends(rows)
            begins = [0, 0]
            sizes = [*x.shape]
            begins[axis] = begin
            sizes[axis] = end - begin
            return raw.Slice(input=x, begin=begins, size=sizes)

        return build, [Given(label, whole)]
    if name == "StridedSlice":
        return lambda rows, x: strided(rows, raw.StridedSlice, input=x), [Given(label, whole)]

    def gradient(rows: int, dy: Any) -> Any:
        shape = [
            label.blocks * label.inner * rows if label.has_rows and place == label.axis else 4
            for place in range(2)
        ]
        return strided(rows, raw.StridedSliceGrad, shape=shape, dy=dy)

    if along:
        label = label._replace(kind=ROWS, blocks=2) if label.kind == ROWS else Label(ROWS, axis, 2)
        unit = label.inner
        inside = label._replace(blocks=bounds[1] - bounds[0])
        return gradient, [Given(inside, whole)]
    sizes = tuple(bounds[1] - bounds[0] if place == axis else 4 for place in range(2))
    return gradient, [Given(label, sizes)]


@case("Pad PadV2 MirrorPad MirrorPadGrad")
def pads(name: str, draw: Any) -> Case:
    label = any_label(draw, 2, power=True)
    axis = int(draw.integers(0, 2))
    along = label.has_rows and label.axis == axis and name == "Pad" and label.kind == ROWS

    def around(rows: int) -> list[list[int]]:
        size = label.inner * rows if along else 1
        return [[size, size] if place == axis else [0, 0] for place in range(2)]

    build: dict[str, Any] = {
        "Pad": lambda rows, x: raw.Pad(input=x, paddings=around(rows)),
        "PadV2": lambda rows, x: raw.PadV2(
            input=x, paddings=around(rows), constant_values=tf.constant(2.0, x.dtype)
        ),
        "MirrorPad": lambda rows, x: raw.MirrorPad(
            input=x, paddings=around(rows), mode="SYMMETRIC"
        ),
        "MirrorPadGrad": lambda rows, x: raw.MirrorPadGrad(
            input=x, paddings=around(rows), mode="SYMMETRIC"
        ),
    }
    return build[name], [Given(label, (4, 4))]


@case("ReverseV2 Roll")
def turns(name: str, draw: Any) -> Case:
    x = tensor(draw, 2)
    axis = int(draw.integers(0, 2))
    if name == "Roll":
        return lambda rows, x: raw.Roll(input=x, shift=[1], axis=[axis]), [x]
    return lambda rows, x: raw.ReverseV2(tensor=x, axis=[axis]), [x]


@case("GatherV2 GatherNd UnsortedSegmentSum ScatterNd OneHot")
def numbers(name: str, draw: Any) -> Case:
    label = rows_of(draw, 0)
    two = bool(draw.random() < 0.5)
    places = Given(label, (2, 3) if two else (2,), tf.int32, 0, 4)
    same = Given(Label(SAME), (2, 3), tf.int32, 0, 4)
    table = Given(Label(SAME, power=int(draw.integers(-1, 2))), (4, 4))
    axis = int(draw.integers(0, 2))
    if name == "GatherV2":
        kind = int(draw.integers(0, 4))
        if kind == 0:
            return lambda rows, x, i: raw.GatherV2(params=x, indices=i, axis=axis), [table, places]
        if kind == 1:
            return lambda rows, x, i: raw.GatherV2(params=x, indices=i, axis=axis), [
                Given(Label(SUM), (4, 4)),
                same,
            ]
        rows = Given(rows_of(draw, 1 - axis, power=True), (4, 4))
        if kind == 2:
            return lambda _, x, i: raw.GatherV2(params=x, indices=i, axis=axis), (
                [
                    rows,
                    same,
                ]
                if rows.label
                else []
            )
        batch = Given(label, (2, 4)), Given(label, (2, 3), tf.int32, 0, 4)
        return lambda rows, x, i: raw.GatherV2(params=x, indices=i, axis=1, batch_dims=1), [*batch]
    if name == "GatherNd":
        return lambda rows, x, i: raw.GatherNd(params=x, indices=i[..., None]), [table, places]
    if name == "OneHot":
        at = int(draw.integers(-1, 2))
        return lambda rows, i: raw.OneHot(
            indices=i, depth=5, on_value=1.0, off_value=0.0, axis=at
        ), [places]
    values = Given(label._replace(power=table.label.power), (*places.sizes, 3))
    if name == "UnsortedSegmentSum":
        if draw.random() < 0.3:
            later = Given(rows_of(draw, 2), (2, 3, 2))
            return lambda rows, x, i: raw.UnsortedSegmentSum(
                data=x, segment_ids=i, num_segments=4
            ), [later, same]
        return lambda rows, x, i: raw.UnsortedSegmentSum(data=x, segment_ids=i, num_segments=4), [
            values,
            places,
        ]
    if draw.random() < 0.3:
        later = Given(rows_of(draw, 2), (2, 3, 2))
        count = later.label.blocks * later.label.inner
        return lambda rows, i, x: raw.ScatterNd(
            indices=i[..., None], updates=x, shape=[4, count * rows]
        ), [same, later]
    return lambda rows, i, x: raw.ScatterNd(indices=i[..., None], updates=x, shape=[4, 3]), [
        places,
        values,
    ]


@case(
    "Where Unique UniqueV2 UniqueWithCounts DynamicPartition NonMaxSuppressionV3 SegmentSum"
    " SegmentMean"
)
def lengths(name: str, draw: Any) -> Case:
    label = Label(SAME) if draw.random() < 0.5 else rows_of(draw, 0)
    x = Given(label, (4,), tf.int32, 0, 3)
    build: dict[str, Any] = {
        "Where": lambda rows, x: raw.Where(condition=x > 1),
        "Unique": lambda rows, x: raw.Unique(x=x),
        "UniqueV2": lambda rows, x: raw.UniqueV2(x=x, axis=[0]),
        "UniqueWithCounts": lambda rows, x: raw.UniqueWithCounts(x=x),
        "DynamicPartition": lambda rows, x: raw.DynamicPartition(
            data=x, partitions=x, num_partitions=3
        ),
        "NonMaxSuppressionV3": lambda rows, x: raw.NonMaxSuppressionV3(
            boxes=tf.stack([tf.cast(x, tf.float32)] * 4, 1),
            scores=tf.cast(x, tf.float32),
            max_output_size=2,
            iou_threshold=0.5,
            score_threshold=0.1,
        ),
        "SegmentSum": lambda rows, x: raw.SegmentSum(data=x, segment_ids=tf.cumsum(x * 0)),
        "SegmentMean": lambda rows, x: raw.SegmentMean(
            data=tf.cast(x, tf.float32), segment_ids=tf.cast(x * 0, tf.int32)
        ),
    }
    return build[name], [x]


@case(
    "TensorListReserve EmptyTensorList TensorListFromTensor TensorListStack TensorListSetItem "
    "TensorListPushBack TensorListGetItem TensorListPopBack TensorListLength "
    "TensorListElementShape"
)
def lists(name: str, draw: Any) -> Case:
    label = any_label(draw, 3, power=True)
    if label.has_rows and label.axis == 0:
        label = label._replace(axis=1)
    x = Given(label, (3, 3, 3))

    def build(rows: int, x: Any) -> Any:
        held = raw.TensorListFromTensor(tensor=x, element_shape=x.shape[1:])
        item = raw.TensorListGetItem(
            input_handle=held, index=1, element_shape=x.shape[1:], element_dtype=x.dtype
        )
        made = raw.TensorListReserve(
            element_shape=x.shape[1:], num_elements=2, element_dtype=x.dtype
        )
        made = raw.TensorListSetItem(input_handle=made, index=0, item=item)
        stack = raw.TensorListStack(
            input_handle=made, element_shape=x.shape[1:], element_dtype=x.dtype
        )
        pushed = raw.TensorListPushBack(
            input_handle=raw.EmptyTensorList(
                element_shape=x.shape[1:], max_num_elements=4, element_dtype=x.dtype
            ),
            tensor=item,
        )
        _, popped = raw.TensorListPopBack(
            input_handle=pushed, element_shape=x.shape[1:], element_dtype=x.dtype
        )
        shape = raw.TensorListElementShape(input_handle=made, shape_type=tf.int32)
        return item, stack, popped, raw.TensorListLength(input_handle=made), shape

    return build, [x]


@case(
    "StaticRegexReplace AsString StringLower StringUpper StringToHashBucketFast LookupTableFindV2"
)
def texts(name: str, draw: Any) -> Case:
    x = Given(rows_of(draw, 0), (4, 2), tf.int64, 0, 9)
    text = tf.strings.as_string
    build: dict[str, Any] = {
        "StaticRegexReplace": lambda rows, x: raw.StaticRegexReplace(
            input=text(x), pattern="1", rewrite="2"
        ),
        "AsString": lambda rows, x: raw.AsString(input=x),
        "StringLower": lambda rows, x: raw.StringLower(input=text(x)),
        "StringUpper": lambda rows, x: raw.StringUpper(input=text(x)),
        "StringToHashBucketFast": lambda rows, x: raw.StringToHashBucketFast(
            input=text(x), num_buckets=7
        ),
        # of a table: tests/trainer/run/test_proof.py
        "LookupTableFindV2": lambda rows, x: raw.AsString(input=x),
    }
    return build[name], [x]


@case("Range")
def ranges(name: str, draw: Any) -> Case:
    longer = bool(draw.random() < 0.5)
    return lambda rows, x: raw.Range(start=0.0, limit=[2.0, rows][longer], delta=1.0), [
        tensor(draw, 1)
    ]
