"""Rules of operations that compute: value by value, sums, products of matrices, convolutions, and
row by row.

Most rules write an operation as an Einsum does: by a letter for each axis of its inputs and of its
output, where rows go with their letter, and by the inputs in which it is linear. Letters are
numbers or words; None stands for an axis along which values of the input are mixed, or that is new
in the output.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from trainer.proof.labels import BY_PLACE, ROWS, SAME, SUM, UNIFORM, ZERO, Label, Mixes, NoRule
from trainer.proof.node import NOT_LINEAR, PAIRS, Axes, Node

OVER_ROWS = "is over the rows of one replica"
DIVIDED = "adds what is divided by the rows of one replica, or by the replicas, and what is not"


Function = TypeVar("Function", bound=Callable[[Node], Axes | Label | list[Label]])
RULES: dict[str, Callable[[Node], Label | list[Label]]] = {}
ALL = (-1,)  # inputs with letters


def rule(types: str, **linear: Any) -> Callable[[Function], Function]:
    """Makes a function the rule of operations of these types: it returns their letters, or labels.

    linear: parameters of `label_by_letters`.
    """

    def keep(function: Function) -> Function:
        @functools.wraps(function)
        def of(node: Node) -> Label | list[Label]:
            result = function(node)
            if isinstance(result, Axes):
                return label_by_letters(node, result, **linear)
            return result

        RULES.update(dict.fromkeys(types.split(), of))
        return function

    return keep


def label_by_letters(
    node: Node,
    axes: Axes,
    terms: Sequence[int] = (),
    factors: Sequence[int] = (),
    *,
    sums: bool = False,
    why: str = OVER_ROWS,
) -> Label:
    """Returns the label of an output with these letters.

    terms: the inputs that are added, joined or kept; factors: those that are multiplied. The
        operation is linear in each of them and in no other. sums: it adds up along letters that the
        output lacks; why: else what it does.
    """
    # An input in which the operation is not linear may be no sum and have no power.
    node.axes.append(axes)
    linear = [*axes.inputs] if ALL in (terms, factors) else [*terms, *factors]
    for number in axes.inputs:
        label = node.label(number)
        if number not in linear and (label.kind == SUM or label.power):
            raise Mixes(NOT_LINEAR)

    # Zeros give zeros, as a factor or where nothing else is added.
    labels = [node.label(number) for number in linear]
    others = [label for label in labels if label.kind != ZERO]
    if labels and (not others or (factors and len(others) < len(labels))):
        return Label(ZERO)

    # A sum meets no rows.
    has_sum = any(label.kind == SUM for label in others)
    if has_sum and any(node.settled(number).has_rows for number in axes.inputs):
        raise Mixes("combines rows and a sum or mean over the rows of one replica")

    # Terms must have one power, and only one factor may be a sum.
    if terms and has_sum:
        others = [label.as_sum() for label in others]
    if terms:
        # What a metric has counted so far has the power of what is added to it.
        counted = [label for label in others if label.of_metric and label.kind == SUM]
        others = [label for label in others if label not in counted] or counted
    if terms and len({label.power for label in others}) > 1:
        raise Mixes(DIVIDED)
    if factors and sum(label.kind == SUM for label in others) > 1:
        raise Mixes(NOT_LINEAR)
    power = sum(label.power for label in others[: 1 if terms else None])

    if has_sum:
        return Label(SUM, power=power)
    return _placed(node, axes, sums, why)._replace(power=power)


def _placed(node: Node, axes: Axes, sums: bool, why: str) -> Label:
    """Returns where the rows are in the output, for inputs of which none is a SUM."""
    output = Label(SAME)
    place = None
    for number, letters in axes.inputs.items():
        label = node.settled(number)
        if not label.has_rows:
            continue
        letter = letters[label.axis]
        if letter is None:
            raise Mixes(why)
        if output.has_rows and letter != place:
            raise Mixes(PAIRS)
        if output.kind == label.kind == ROWS and output[2:4] != label[2:4]:
            raise NoRule("meets rows in another order")
        places = output.places + label.places
        if output.kind != ROWS:
            output = label._replace(of_metric=False)
            place = letter
        is_number = output.is_number and len(axes.inputs) == 1
        output = output._replace(places=places, is_number=is_number)
    if not output.has_rows:
        return output
    if place in axes.output:
        return output._replace(axis=axes.output.index(place))
    if not sums:
        raise Mixes(why)
    return Label(SUM)


def broadcast(node: Node, *numbers: int) -> Axes:
    """Returns the letters of an operation, value by value, on these inputs, or on all."""
    ranks = {number: node.rank(number) for number in numbers or range(len(node.labels))}
    letters: dict[int, Sequence[Any]] = {}
    for number, rank in ranks.items():
        letters[number] = range(-rank, 0)
    return Axes(letters, range(-max(ranks.values()), 0))


rule("Add AddV2 Sub", terms=ALL)(broadcast)
rule("SigmoidGrad TanhGrad RsqrtGrad SqrtGrad InvGrad ReciprocalGrad", factors=(1,))(broadcast)
rule("ReluGrad Relu6Grad LeakyReluGrad EluGrad SeluGrad SoftplusGrad SoftsignGrad", factors=(0,))(
    broadcast
)
rule("L2Loss", factors=(0, 0), sums=True)(lambda node: broadcast(node)._replace(output=()))
rule("SelectV2 Select", terms=(1, 2))(broadcast)
rule(
    "Acos Acosh Asin Asinh Atan Atan2 Atanh BitwiseAnd BitwiseOr BitwiseXor Bucketize Ceil"
    " ClipByValue Cos Cosh Digamma Elu Equal Erf Erfc Erfinv Exp Expm1 Floor FloorDiv FloorMod"
    " Greater GreaterEqual Inv IsFinite IsInf IsNan Less LessEqual Lgamma Log Log1p LogicalAnd"
    " LogicalNot LogicalOr Mod NotEqual Pow Reciprocal Relu6 Rint Round Rsqrt"
    " Selu Sigmoid Sin Sinh Softplus Softsign Tan Tanh TruncateDiv TruncateMod Xdivy Xlog1py"
    " Xlogy RightShift LeftShift Bitcast Invert BesselI0e BesselI1e StaticRegexReplace AsString"
    " StringLower StringUpper StringToHashBucketFast"
)(broadcast)
rule("LookupTableFindV2")(lambda node: broadcast(node, 1))


@rule("Mul MulNoNan", factors=ALL)
def product(node: Node) -> Axes | Label:
    """Multiplies values; places are counted in larger steps."""
    axes = broadcast(node)
    places = [node.label(number).places for number in (0, 1)]
    if not any(places):
        return axes
    factor = node.value(places.index(0)) if 0 in places else ()
    if np.size(factor) != 1:
        raise Mixes(BY_PLACE)
    label = label_by_letters(node, axes, factors=ALL)
    return label._replace(places=label.places * int(np.ravel(factor)[0]))


@rule("RealDiv DivNoNan")
def quotient(node: Node) -> Label:
    """Is linear in the numerator; the denominator may have a power, but be no SUM."""
    denominator = node.label(1)
    if denominator.kind == SUM:
        raise Mixes("divides by a sum over the rows of one replica")
    if denominator.kind == ZERO:
        raise NoRule("divides by zero")
    label = label_by_letters(node, broadcast(node), factors=ALL)
    return (
        label if label.kind == ZERO else label._replace(power=label.power - 2 * denominator.power)
    )


@rule(
    "Identity StopGradient PreventGradient Snapshot Neg EnsureShape PlaceholderWithDefault"
    " CheckNumerics Real Imag",
    terms=(0,),
)
def linear_part(node: Node) -> Axes | Label:
    """Gives its first input, up to the sign, or a linear part of it."""
    is_list = not node.dtype.is_numpy_compatible
    return node.label(0) if is_list or node.shapes[0][0] is None else broadcast(node, 0)


@rule("IdentityN")
def all_inputs(node: Node) -> list[Label]:
    """Gives all its inputs."""
    node.read.update(range(len(node.labels)))
    return node.labels


@rule("Cast", terms=(0,))
def cast(node: Node) -> Axes | Label:
    """Is linear, unless it rounds to integers or asks whether a number is not zero."""
    if node.label(0).places and not node.dtype.is_integer:
        raise Mixes(BY_PLACE)
    was_floating = node.operations[0].inputs[0].dtype.is_floating
    narrows = node.dtype.is_bool or (node.dtype.is_integer and was_floating)
    if narrows and node.label(0).kind != ZERO:
        return label_by_letters(node, broadcast(node))
    return linear_part(node)


# Functions of which a multiple of the inputs makes that multiple, to this exponent.
_EXPONENTS = {
    **dict.fromkeys(("Abs", "LeakyRelu", "Maximum", "Minimum", "Relu"), 1),
    "Sign": 0,
    "Sqrt": 0.5,
    "Square": 2,
    "SquaredDifference": 2,
}


@rule(" ".join(_EXPONENTS))
def of_multiples(node: Node) -> Label:
    """Multiplies the power by an exponent."""
    labels = [node.label(number) for number in range(len(node.labels))]
    powers = {label.power for label in labels if label.kind != ZERO} or {0}
    power = powers.pop() * _EXPONENTS[node.type]
    if powers or power != int(power) or SUM in [label.kind for label in labels]:
        raise Mixes(NOT_LINEAR)
    return label_by_letters(node, broadcast(node), terms=ALL)._replace(power=int(power))


@rule("ZerosLike")
def zeros(node: Node) -> Label:
    """Gives zeros."""
    node.label(0)
    return Label(ZERO)


@rule("OnesLike")
def ones(node: Node) -> Label:
    """Depends on the shape alone."""
    label = node.settled(0)
    return Label(UNIFORM, label.axis) if label.has_rows else Label(SAME)


def reduced(node: Node) -> Axes:
    """Returns the letters of a reduction, whose axes are its second input."""
    rank = node.rank(0)
    axes = {int(axis) % max(rank, 1) for axis in np.ravel(node.value(1))}
    if not node.type.startswith("Arg") and node.attribute("keep_dims"):
        return Axes({0: range(rank)}, [None if axis in axes else axis for axis in range(rank)])
    return Axes({0: range(rank)}, [axis for axis in range(rank) if axis not in axes])


rule("Max Min Prod All Any EuclideanNorm ArgMax ArgMin")(reduced)


@rule("Sum Mean")
def summed(node: Node) -> Label:
    """Sums over rows, or takes the mean of those of one replica."""
    label_of_input = node.label(0) if node.labels[0].kind == ZERO else node.settled(0)
    label = label_by_letters(node, reduced(node), terms=(0,), sums=True)
    if not label_of_input.has_rows or label.has_rows:
        return label
    if label_of_input.kind == UNIFORM:
        return Label(SAME, power=label.power + (node.type == "Sum"))
    return label._replace(power=label.power - (node.type == "Mean"))


def along(node: Node) -> Axes:
    """Returns the letters of an operation along one axis, its second input."""
    letters: list[Any] = [*range(node.rank(0))]
    letters[int(node.value(1))] = None
    return Axes({0: letters}, letters)


rule("Cumsum", terms=(0,))(along)
rule("Cumprod")(along)


@rule("MatMul BatchMatMulV2 BatchMatMulV3", factors=ALL, sums=True)
def matrix_product(node: Node) -> Axes:
    """Sums over the last axis of the first input and the last but one of the second.

    They are the other two of the last axes where the inputs are transposed.
    """
    names = ("transpose_a", "transpose_b") if node.type == "MatMul" else ("adj_x", "adj_y")
    inputs: dict[int, Sequence[Any]] = {}
    for number, letters in enumerate((["row", "sum"], ["sum", "column"])):
        if node.attribute(names[number]):
            letters.reverse()
        inputs[number] = [*range(2 - node.rank(number), 0), *letters]
    return Axes(inputs, [*range(2 - max(node.rank(0), node.rank(1)), 0), "row", "column"])


def letters_of(equation: str, ranks: Sequence[int]) -> tuple[list[list[Any]], list[Any]]:
    """Returns a letter for each axis of each input and of the output of an Einsum.

    The axes of an ellipsis have negative numbers. `ranks`: those of the inputs.
    """
    inputs, output = equation.split("->")
    terms = inputs.split(",")
    hidden = [rank - len(term.replace("...", "")) for term, rank in zip(terms, ranks, strict=True)]

    def letters(term: str, count: int) -> list[Any]:
        before, dots, after = term.partition("...")
        return [*before, *(range(-count, 0) if dots else ()), *after]

    named = [letters(term, count) for term, count in zip(terms, hidden, strict=True)]
    return named, letters(output, max(hidden))


@rule("Einsum", factors=ALL, sums=True)
def einstein_sum(node: Node) -> Axes:
    """Is a sum of products by its equation."""
    equation = node.attribute("equation").decode()
    inputs, output = letters_of(
        equation, [node.rank(number) for number in range(equation.count(",") + 1)]
    )
    if any(len({*letters}) < len(letters) for letters in inputs):
        raise NoRule("takes a diagonal")
    return Axes(dict(enumerate(inputs)), output)


def by_row(
    *numbers: int, whole: int | None = None, sizes: int | None = None, summed: bool = False
) -> Callable[[Node], Axes]:
    """Returns the rule of an operation that treats each entry of the first axis by itself.

    numbers: the inputs with such an axis; whole: an input that may have no rows; sizes: one of
        which only the value counts; summed: the entries are added up.
    """

    def of(node: Node) -> Axes:
        inputs: dict[int, Sequence[Any]] = {}
        for number in numbers:
            inputs[number] = ["row", *[None] * (node.rank(number) - 1)]
        if whole is not None:
            inputs[whole] = [None] * node.rank(whole)
        if sizes is not None:
            node.setting(sizes)
        return Axes(inputs, [] if summed else ["row"])

    return of


rule("Conv2D DepthwiseConv2dNative Conv3D", factors=ALL)(by_row(0, whole=1))
rule("Conv2DBackpropInput DepthwiseConv2dNativeBackpropInput Conv3DBackpropInputV2", factors=ALL)(
    by_row(2, whole=1, sizes=0)
)
rule(
    "Conv2DBackpropFilter DepthwiseConv2dNativeBackpropFilter Conv3DBackpropFilterV2",
    factors=ALL,
    sums=True,
)(by_row(0, 2, sizes=1, summed=True))
rule("MaxPool MaxPool3D RGBToHSV HSVToRGB AdjustContrastv2 AdjustHue AdjustSaturation")(by_row(0))
rule(
    "AvgPool AvgPool3D SpaceToDepth DepthToSpace ResizeNearestNeighborGrad ExtractImagePatches",
    terms=ALL,
)(by_row(0))
rule("ResizeBilinear ResizeBicubic ResizeNearestNeighbor", terms=ALL)(by_row(0))
rule("MaxPoolGrad MaxPool3DGrad MaxPoolGradGrad", factors=(2,))(by_row(0, 1, 2))
rule("AvgPoolGrad AvgPool3DGrad", terms=ALL)(by_row(1, sizes=0))
rule("ResizeBilinearGrad ResizeBicubicGrad ImageProjectiveTransformV3", factors=(0,))(by_row(0, 1))
rule("InTopKV2 SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits")(by_row(0, 1))


@rule("DenseBincount")
def counts_of_classes(node: Node) -> Axes:
    """Counts in each row how often each class comes."""
    letters = ["row", None][2 - node.rank(0) :]
    return Axes({0: letters, 2: ["row", None][2 - node.rank(2) :]}, ["row"])


def over_trailing(count: int) -> Callable[[Node], Axes]:
    """Returns the rule of an operation that mixes values along its first input's last axes."""

    def of(node: Node) -> Axes:
        letters = [*range(node.rank(0) - count), *[None] * count]
        return Axes({0: letters}, letters)

    return of


rule("Softmax LogSoftmax FFT IFFT RFFT IRFFT TopKV2")(over_trailing(1))
rule(
    "Cholesky MatrixInverse MatrixDeterminant LogMatrixDeterminant Svd Qr SelfAdjointEigV2"
    " MatrixBandPart"
)(over_trailing(2))


def _channels(node: Node) -> int:
    """Returns the number of the axis of channels."""
    return 1 if node.attribute("data_format") == b"NCHW" else node.rank(0) - 1


@rule("BiasAdd", terms=ALL)
def bias_added(node: Node) -> Axes:
    """Adds a vector along the axis of channels."""
    letters = range(node.rank(0))
    return Axes({0: letters, 1: [_channels(node)]}, letters)


@rule("BiasAddGrad", terms=ALL, sums=True)
def bias_gradient(node: Node) -> Axes:
    """Sums over all axes but that of channels."""
    return Axes({0: range(node.rank(0))}, [_channels(node)])
