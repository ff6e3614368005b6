"""Rules of operations that compute: value by value, sums, products of matrices, convolutions, and row by row."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from trainer.proof.labels import ROWS, SAME, SUM, UNIFORM, ZERO, Label, Mixes, NoRule
from trainer.proof.node import Node

Rule = Callable[[Node], Label | list[Label]]
Function = TypeVar("Function", bound=Rule)
RULES: dict[str, Rule] = {}

NOT_LINEAR = "is not linear in a sum over the rows of one replica"


def rule(types: str) -> Callable[[Function], Function]:
    """Makes a function the rule of operations of these types."""

    def keep(function: Function) -> Function:
        RULES.update(dict.fromkeys(types.split(), function))
        return function

    return keep


def aligned(node: Node, numbers: Sequence[int]) -> Label:
    """Returns where the rows are in the output of an operation that broadcasts these inputs; without a power.

    None of them may be a SUM.
    """
    rank, found = node.rank(), Label(SAME)
    for number in numbers:
        label = node.settled(number)
        if not label.has_rows:
            continue
        axis = label.axis + rank - len(node.shape(number))
        label = label._replace(axis=axis, power=0, of_metric=False)
        if found.has_rows and found.axis != axis:
            raise Mixes("pairs the rows of one replica with each other")
        if found.kind == label.kind == ROWS and found != label:
            raise NoRule("meets rows in another order")
        found = label if found.kind != ROWS else found
    return found


def powers_of(node: Node, numbers: Sequence[int]) -> list[int]:
    """Returns the powers of the inputs that are not zero."""
    return [node.labels[number].power for number in numbers if node.labels[number].kind != ZERO]


def nonlinear(node: Node) -> Label:
    """Is the rule of an operation that computes each value from those in its place."""
    numbers = range(len(node.labels))
    if any(label.kind == SUM for label in node.labels):
        raise Mixes(NOT_LINEAR)
    if any(powers_of(node, numbers)):
        raise Mixes("is not linear in what depends on how many rows a replica has")
    return aligned(node, numbers)


def added(node: Node, numbers: Sequence[int] | None = None) -> Label:
    """Is the rule of a sum, value by value: terms must have equal powers."""
    numbers = range(len(node.labels)) if numbers is None else numbers
    labels = [node.labels[number] for number in numbers if node.labels[number].kind != ZERO]
    if not labels and not any(node.settled(number).has_rows for number in numbers):
        return Label(ZERO)
    if any(label.kind == SUM for label in labels):
        if any(label.has_rows for label in labels):
            raise Mixes("adds rows and a sum over the rows of one replica")
        labels = [label.as_sum() for label in labels]
    if len({label.power for label in labels}) > 1:
        raise Mixes("adds what is divided by the rows of one replica, or by the replicas, and what is not")
    power = labels[0].power if labels else 0
    if labels and labels[0].kind == SUM:
        return Label(SUM, power=power)
    return aligned(node, numbers)._replace(power=power)


def product(node: Node, numbers: Sequence[int] | None = None, power: int | None = None) -> Label:
    """Is the rule of a product, value by value: one factor may be a SUM, and then none has rows."""
    numbers = range(len(node.labels)) if numbers is None else numbers
    labels = [node.labels[number] for number in numbers]
    if power is None:
        power = sum(powers_of(node, numbers))
    if any(label.kind == ZERO for label in labels):
        return Label(ZERO)
    if not any(label.kind == SUM for label in labels):
        return aligned(node, numbers)._replace(power=power)
    if sum(label.kind == SUM for label in labels) > 1:
        raise Mixes(NOT_LINEAR)
    if any(label.has_rows for label in labels):
        raise Mixes("multiplies rows by a sum over the rows of one replica")
    return Label(SUM, power=power)


def quotient(node: Node) -> Label:
    """Is the rule of a division: its denominator may be no SUM."""
    numerator, denominator = node.labels
    if denominator.kind == SUM:
        raise Mixes("divides by a sum over the rows of one replica")
    if numerator.kind == ZERO:
        return Label(ZERO)
    return product(node, power=numerator.power - denominator.power)


def linear_in(place: int) -> Rule:
    """Returns the rule of an operation that multiplies this input by a function of the others."""

    def of(node: Node) -> Label:
        for number, label in enumerate(node.labels):
            if number != place and label.kind == SUM:
                raise Mixes(NOT_LINEAR)
            if number != place and label.power:
                raise Mixes("is not linear in what depends on how many rows a replica has")
        return product(node)

    return of


rule("Add AddV2 AddN Sub")(added)
rule("Mul MulNoNan")(product)
rule("RealDiv DivNoNan Div")(quotient)
rule("SigmoidGrad TanhGrad RsqrtGrad SqrtGrad InvGrad ReciprocalGrad")(linear_in(1))
rule("ReluGrad Relu6Grad LeakyReluGrad EluGrad SeluGrad SoftplusGrad SoftsignGrad")(linear_in(0))
rule(
    "Abs Acos Acosh Asin Asinh Atan Atan2 Atanh BitwiseAnd BitwiseOr BitwiseXor Ceil ClipByValue Cos Cosh Digamma Elu "
    "Equal Erf Erfc Erfinv Exp Expm1 Floor FloorDiv FloorMod Greater GreaterEqual Inv IsFinite IsInf IsNan LeakyRelu "
    "Less LessEqual Lgamma Log Log1p LogicalAnd LogicalNot LogicalOr Maximum Minimum Mod NextAfter NotEqual Pow "
    "Reciprocal Relu Relu6 Rint Round Rsqrt Selu Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Tan Tanh TruncateDiv "
    "TruncateMod Xdivy Xlog1py Xlogy RightShift LeftShift Bitcast Invert Betainc Igamma Igammac Zeta Polygamma "
    "BesselI0e BesselI1e StaticRegexReplace AsString StringLower StringUpper StringToHashBucketFast LookupTableFindV2"
)(nonlinear)


@rule("Identity StopGradient PreventGradient Snapshot Neg EnsureShape PlaceholderWithDefault CheckNumerics")
def kept(node: Node) -> Label:
    """Is the rule of an operation that gives its first input, up to the sign."""
    return node.labels[0]


@rule("IdentityN")
def each_kept(node: Node) -> list[Label]:
    """Is the rule of an operation that gives all its inputs."""
    return node.labels


@rule("Cast")
def cast(node: Node) -> Label:
    """Is linear, unless it rounds to integers or asks whether a number is not zero."""
    before, after = node.operations[0].inputs[0].dtype, node.operations[0].outputs[0].dtype
    narrows = after.is_bool or (after.is_integer and before.is_floating)
    return nonlinear(node) if narrows and node.labels[0].kind != ZERO else node.labels[0]


@rule("Square SquaredDifference")
def squared(node: Node) -> Label:
    """Doubles the power."""
    label = added(node)
    if label.kind == SUM:
        raise Mixes(NOT_LINEAR)
    return label._replace(power=2 * label.power)


@rule("Select SelectV2")
def selected(node: Node) -> Label:
    """Is linear in what it selects from, for a condition that is no SUM."""
    condition = node.settled(0)
    if condition.kind == SUM or condition.power:
        raise Mixes(NOT_LINEAR)
    label = added(node, (1, 2))
    if not condition.has_rows:
        return label
    if label.kind == SUM:
        raise Mixes("selects by rows from a sum over the rows of one replica")
    if label.kind == ZERO:
        return label
    if node.type == "Select" and len(node.shape(0)) != node.rank():  # its condition has the first axis alone
        raise NoRule("broadcasts its condition")
    return aligned(node, (0, 1, 2))._replace(power=label.power)


@rule("ZerosLike")
def zeros(node: Node) -> Label:
    """Is the rule of what gives zeros."""
    return Label(ZERO)


@rule("OnesLike")
def ones(node: Node) -> Label:
    """Depends on the shape alone."""
    label = node.settled(0)
    return label._replace(kind=UNIFORM, power=0, blocks=1, inner=1) if label.has_rows else Label(SAME)


def _axes(node: Node, number: int = 1) -> set[int]:
    rank = len(node.shape(0))
    return {int(axis) % max(rank, 1) for axis in np.ravel(node.value(number))}


def without(label: Label, axes: set[int], *, keep: bool) -> Label:
    """Returns a label of rows once these other axes are gone, or of the length 1 if they are kept."""
    return label if keep else label._replace(axis=label.axis - sum(axis < label.axis for axis in axes))


@rule("Sum Mean")
def reduced(node: Node) -> Label:
    """Sums over rows, or takes the mean of those of one replica."""
    label = node.settled(0) if node.labels[0].kind != ZERO else node.labels[0]
    if not label.has_rows:
        return label
    axes = _axes(node)
    if label.axis not in axes:
        return without(label, axes, keep=node.attribute("keep_dims"))
    if label.kind == UNIFORM:
        return Label(SAME, power=label.power + (node.type == "Sum"))
    return Label(SUM, power=label.power - (node.type == "Mean"))


@rule("Max Min Prod All Any EuclideanNorm")
def reduced_otherwise(node: Node) -> Label:
    """Mixes rows unless the axis of rows stays."""
    label = node.settled(0)
    if label.kind == SUM:
        raise Mixes(NOT_LINEAR)
    if label.power and node.type not in ("Max", "Min"):
        raise Mixes("is not linear in what depends on how many rows a replica has")
    if not label.has_rows:
        return label
    axes = _axes(node)
    if label.axis not in axes:
        return without(label, axes, keep=node.attribute("keep_dims"))
    if label.kind == UNIFORM and node.type in ("Max", "Min", "All", "Any"):
        return Label(SAME, power=label.power)
    raise Mixes("is over the rows of one replica")


@rule("L2Loss")
def half_of_squares(node: Node) -> Label:
    """Sums the squares of all values."""
    label = node.whole()
    if label.kind == SUM:
        raise Mixes(NOT_LINEAR)
    return Label(SUM if label.kind == ROWS else SAME, power=2 * label.power)


@rule("ArgMax ArgMin Cumsum Cumprod")
def along_one_axis(node: Node) -> Label:
    """Mixes values along an axis, which may not be that of rows."""
    label = node.whole()
    if label.kind == SUM and node.type != "Cumsum":
        raise Mixes(NOT_LINEAR)
    if label.power and node.type != "Cumsum":
        raise Mixes("is not linear in what depends on how many rows a replica has")
    if not label.has_rows:
        return label
    (axis,) = _axes(node)
    if axis == label.axis:
        raise Mixes("is over the rows of one replica")
    return without(label, {axis}, keep=not node.type.startswith("Arg"))


def contracted(node: Node, letters: Sequence[Sequence[Any]], output: Sequence[Any], numbers: Sequence[int]) -> Label:
    """Is the rule of sums of products, as Einsum writes them: a letter names each axis of the inputs and the output."""
    labels = [node.whole(number) for number in numbers]
    power = sum(powers_of(node, numbers))
    if any(node.labels[number].kind == ZERO for number in numbers):
        return Label(ZERO)
    with_rows = [(label, of[label.axis]) for label, of in zip(labels, letters, strict=True) if label.has_rows]
    with_axes = [number for number, label in zip(numbers, labels, strict=True) if label.has_rows]
    sums = [label for label in labels if label.kind == SUM]
    if sums and (with_rows or len(sums) > 1):
        raise Mixes(NOT_LINEAR)
    if sums:
        return Label(SUM, power=power)
    if not with_rows:
        return Label(SAME, power=power)
    if len({letter for _, letter in with_rows}) > 1:
        raise Mixes("pairs the rows of one replica with each other")
    ordered = [pair for pair, number in zip(with_rows, with_axes, strict=True) if node.settled(number).kind == ROWS]
    if len({(label.blocks, label.inner) for label, _ in ordered}) > 1:
        raise NoRule("meets rows in another order")
    label, letter = (ordered or with_rows)[0]
    if letter not in output:
        return Label(SUM, power=power)
    return label._replace(kind=ROWS if ordered else UNIFORM, axis=output.index(letter), power=power)


@rule("MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3")
def matrix_product(node: Node) -> Label:
    """Sums over the last axis of the first input and the last but one of the second, unless they are transposed."""
    plain = node.type == "MatMul"
    flags = [node.attribute(name) for name in (("transpose_a", "transpose_b") if plain else ("adj_x", "adj_y"))]
    first, second = len(node.shape(0)), len(node.shape(1))
    inside = [["row", "sum"], ["sum", "column"]]
    letters = [
        [*range(2 - rank, 0), *(of[::-1] if flag else of)]
        for rank, of, flag in zip((first, second), inside, flags, strict=True)
    ]
    output = [*range(2 - max(first, second), 0), "row", "column"]
    return contracted(node, letters, output, (0, 1))


@rule("Einsum")
def einstein_sum(node: Node) -> Label:
    """Is a sum of products by its equation."""
    inputs, output = node.attribute("equation").decode().split("->")
    terms = inputs.split(",")
    ranks = [len(node.shape(number)) for number in range(len(terms))]
    hidden = [rank - len(term.replace("...", "")) for term, rank in zip(terms, ranks, strict=True)]

    def letters(term: str, count: int) -> list[Any]:
        before, dots, after = term.partition("...")
        return [*before, *(range(-count, 0) if dots else ()), *after]

    named = [letters(term, count) for term, count in zip(terms, hidden, strict=True)]
    if any(len(set(of)) < len(of) for of in named):
        raise NoRule("takes a diagonal")
    return contracted(node, named, letters(output, max(hidden)), range(len(terms)))


_CONVOLVED = ("convolved",)  # all axes but that of the batch


def _convolution(numbers: tuple[int, int], batches: tuple[bool, bool], *, batch_in_output: bool) -> Rule:
    """Returns the rule of a convolution or its gradients; `batches`: which of the two inputs have a batch axis."""

    def of(node: Node) -> Label:
        letters = []
        for number, has_batch in zip(numbers, batches, strict=True):
            label = node.settled(number)
            if label.has_rows and not (has_batch and label.axis == 0):
                raise Mixes("convolves along the rows of one replica, or by filters made of them")
            letters.append(["batch" if has_batch else "filter", *_CONVOLVED * (len(node.shape(number)) - 1)])
        return contracted(node, letters, ["batch"] if batch_in_output else [], numbers)

    return of


rule("Conv2D DepthwiseConv2dNative Conv3D Conv")(_convolution((0, 1), (True, False), batch_in_output=True))
rule("Conv2DBackpropInput DepthwiseConv2dNativeBackpropInput Conv3DBackpropInputV2")(
    _convolution((2, 1), (True, False), batch_in_output=True)
)
rule("Conv2DBackpropFilter DepthwiseConv2dNativeBackpropFilter Conv3DBackpropFilterV2")(
    _convolution((0, 2), (True, True), batch_in_output=False)
)


def by_row(*data: int, linear: int | None = None) -> Callable[[Node], Label]:
    """Returns the rule of an operation that treats each entry of the first axis by itself.

    data: the inputs that may have rows, and first axes of one length; linear: the one that may have a power.
    """

    def of(node: Node) -> Label:
        labels = [node.settled(number) for number in data]
        for number, label in enumerate(node.labels):
            if label.kind == SUM and (number != linear or any(other.has_rows for other in labels)):
                raise Mixes(NOT_LINEAR)
            if number not in data and label.has_rows:
                raise Mixes("takes its settings from the rows of one replica")
            if label.power and number != linear:
                raise Mixes("is not linear in what depends on how many rows a replica has")
        power = 0 if linear is None else node.labels[linear].power
        if any(label.kind == SUM for label in node.labels):
            return Label(SUM, power=power)
        with_rows = [label for label in labels if label.has_rows]
        if any(label.axis for label in with_rows):
            raise Mixes("mixes the rows of one replica")
        ordered = [label for label in with_rows if label.kind == ROWS]
        if len({(label.blocks, label.inner) for label in ordered}) > 1:
            raise NoRule("meets rows in another order")
        return (ordered or with_rows or [Label(SAME)])[0]._replace(power=power)

    return of


rule("MaxPool MaxPool3D LRN RGBToHSV HSVToRGB")(by_row(0))
rule("AvgPool AvgPool3D ResizeBilinear ResizeBicubic ResizeNearestNeighbor ResizeArea")(by_row(0, linear=0))
rule("SpaceToDepth DepthToSpace ExtractImagePatches")(by_row(0, linear=0))
rule("MaxPoolGrad MaxPool3DGrad")(by_row(0, 1, 2, linear=2))
rule("MaxPoolGradGrad")(by_row(0, 1, 2, linear=2))
rule("AvgPoolGrad AvgPool3DGrad")(by_row(1, linear=1))
rule("ResizeBilinearGrad ResizeBicubicGrad")(by_row(0, 1, linear=0))
rule("ResizeNearestNeighborGrad")(by_row(0, linear=0))
rule("ImageProjectiveTransformV3 ImageProjectiveTransformV2")(by_row(0, 1, linear=0))
rule("AdjustContrastv2 AdjustHue AdjustSaturation")(by_row(0))
rule("InTopKV2")(by_row(0, 1))


@rule("DenseBincount")
def counts_of_classes(node: Node) -> Label:
    """Counts, in each row or over all of them, how often each class comes."""
    node.value(1)
    if len(node.shape(0)) == 2:
        return by_row(0, 2)(node)
    labels = [node.whole(number) for number in (0, 2)]
    if any(label.kind == SUM or label.power for label in labels):
        raise Mixes(NOT_LINEAR)
    if node.attribute("binary_output"):
        raise Mixes("says what classes the rows of one replica have")
    return Label(SUM if labels[0].has_rows else SAME)


@rule("SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits")
def cross_entropy(node: Node) -> list[Label]:
    """Gives the loss and the gradient of each row."""
    label = by_row(0, 1)(node)
    return [label, label]


def by_trailing_axes(count: int) -> Callable[[Node], Label]:
    """Returns the rule of an operation that mixes values along the last `count` axes of its first input alone."""

    def of(node: Node) -> Label:
        label = node.whole()
        if label.kind == SUM:
            raise Mixes(NOT_LINEAR)
        if any(powers_of(node, range(len(node.labels)))):
            raise Mixes("is not linear in what depends on how many rows a replica has")
        if any(other.kind not in (SAME, ZERO) for other in node.labels[1:]):
            raise NoRule("has several inputs with rows")
        if label.has_rows and label.axis >= len(node.shape(0)) - count:
            raise Mixes("is over the rows of one replica")
        return label

    return of


rule("Softmax LogSoftmax FFT IFFT RFFT IRFFT")(by_trailing_axes(1))
rule("Cholesky MatrixInverse MatrixDeterminant FFT2D RFFT2D IRFFT2D MatrixBandPart")(by_trailing_axes(2))
rule("Svd Qr SelfAdjointEigV2 LogMatrixDeterminant")(lambda node: [by_trailing_axes(2)(node)] * 3)
rule("TopKV2")(lambda node: [by_trailing_axes(1)(node)] * 2)


@rule("BiasAdd")
def bias_added(node: Node) -> Label:
    """Adds a vector along the axis of channels."""
    if node.labels[1].has_rows:
        raise Mixes("adds the rows of one replica along another axis")
    if SUM in (node.labels[0].kind, node.labels[1].kind) or node.attribute("data_format") == b"NHWC":
        return added(node)
    label, bias = node.settled(0), node.labels[1]
    if bias.kind != ZERO and label.power != bias.power:
        raise Mixes("adds what is divided by the rows of one replica, or by the replicas, and what is not")
    return label


@rule("BiasAddGrad")
def bias_gradient(node: Node) -> Label:
    """Sums over all axes but that of channels."""
    label = node.whole()
    if not label.has_rows:
        return label
    if label.axis == (1 if node.attribute("data_format") == b"NCHW" else len(node.shape(0)) - 1):
        raise NoRule("has rows as channels")
    return Label(SUM, power=label.power)


@rule("FusedBatchNormV3")
def batch_norm(node: Node) -> list[Label]:
    """Normalises by statistics that it is given, or by those of one replica's rows."""
    if node.attribute("is_training"):
        raise Mixes("normalises by the rows of one replica")
    label = by_row(0)(node)
    return [label, *[Label(SAME)] * 5]


@rule("FusedBatchNormGradV3")
def batch_norm_gradient(node: Node) -> list[Label]:
    """Gives the gradients for the rows, the scale and the offset."""
    if node.attribute("is_training"):
        raise Mixes("normalises by the rows of one replica")
    label = by_row(0, 1, linear=0)(node)
    summed = Label(SUM if label.has_rows else label.kind, power=label.power)
    return [label, summed, summed, Label(SAME), Label(SAME)]
