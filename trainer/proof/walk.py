"""Walks through the graphs of both traces at once and labels every tensor: see
`trainer.proof.labels`.

Functions are walked where they are called, both branches of a condition count, and a loop is walked
until the labels of what it carries stay as they are.
"""

import functools
import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from trainer.invariance.internals import graph_of_function
from trainer.proof import places  # noqa: F401 - its rules
from trainer.proof.arithmetic import RULES, label_by_letters
from trainer.proof.labels import (
    MIXED,
    ROWS,
    SAME,
    SUM,
    UNKNOWN,
    ZERO,
    Inherited,
    Label,
    Mixes,
    NoRule,
    Shapes,
    fits,
    joined,
    label_of_values,
)
from trainer.proof.node import Axes, Node, Values, shapes_with, sizes_of

# The names of identity operations that mark what the graph of one replica cannot show.
SUMMED = "trainer_summed"
DRAWN = "trainer_drawn"
NUMBER = "trainer_replica_number"
BY_ROW = "trainer_by_row"  # of what a layer gives for each row, and of its inputs
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_BRANCHES = {
    "If": ("then_branch", "else_branch"),
    "StatelessIf": ("then_branch", "else_branch"),
    "Case": ("branches",),
    "StatelessCase": ("branches",),
}
_LOOPS = ("While", "StatelessWhile")
_Labels = Label | list[Label]  # of all outputs alike, or of each
_MOST_TURNS = 20  # after which a loop's labels should stay as they are
# Operations with a state that no variable and no other tensor sees.
_HARMLESS = {
    "Assert",
    "PrintV2",
    "Timestamp",
    "NoOp",
    "VarHandleOp",
    "VarIsInitializedOp",
    "LookupTableFindV2",
    "VariableShape",
    "WriteScalarSummary",
}
# Attributes that follow from shapes, or name functions: the walk compares what they stand for.
_IGNORED = re.compile(
    r"_|shape$|.*shapes$|f$|cond$|body$|then_branch$|else_branch$|branches$|value$|element_shape$|N$"
)
_ASSIGNS = re.compile(
    "Assign|ResourceApply|ResourceScatter|ResourceSparseApply|ResourceStridedSliceAssign"
)
_DRAWS = re.compile("Random|Multinomial|TruncatedNormal|Stateful|Rng|Shuffle|DistortedBoundingBox")


class Different(Exception):
    """Reports that the traces differ in more than the number of rows: the text says how."""


class Variable(NamedTuple):
    """Describes a variable that the step captures."""

    name: str
    is_metric: bool = False
    # the number of the metric that divides it by a count, which may have any factor that both share
    mean: int | None = None
    own_value: bool = False  # whether each replica keeps a value of its own
    # "mean" or "sum", if the values of the replicas are combined where they are assigned
    combined: str = ""
    updated: bool = False  # whether an optimizer updates it, or keeps it
    shape: tuple[int, ...] = ()


class Assignment(NamedTuple):
    """Describes what a variable is given.

    The label is that of the worst value among an operation's inputs.
    """

    variable: Variable
    operation: Any
    label: Label
    place: int  # of the operation of the step that makes it, among all of them


class _Tensor(NamedTuple):
    """Holds what is known of a tensor, such as its value or the variable that it refers to."""

    label: Label
    shapes: Shapes
    value: Values | None
    variable: Variable | None


_Frame = dict[str, _Tensor]  # of one call of a function, by the names that the first trace gives


@dataclass
class Walk:
    """Labels the tensors of two traces, and collects what their operations assign.

    rows: the number of rows in each trace.
    """

    rows: tuple[int, int]
    assignments: list[Assignment] = field(default_factory=list)
    # labels of the operations that mix rows, in the order of the graph
    mixed: list[Label] = field(default_factory=list)
    # labels of operations with a state and without a rule
    stateful: list[Label] = field(default_factory=list)
    # the powers of what metrics have counted, by their numbers
    _powers: dict[int, int] = field(default_factory=dict)
    # labels of the conditions and loops around, if they are bad
    _doubt: list[Label] = field(default_factory=list)
    # places of the operations that call what is visited, the outermost first
    _places: list[int] = field(default_factory=list)

    def graphs(
        self,
        graphs: tuple[Any, Any],
        labels: Sequence[Label],
        known: Sequence[Values | None],
        variables: Sequence[Variable | None],
    ) -> tuple[list[Label], list[Values | None]]:
        """Labels all tensors of two graphs, given what their inputs are.

        Returns the labels and values of outputs. Raises Different if the graphs do not have the
        same operations in the same order.
        """
        # The frame holds what is known of each tensor of this call, at first of the inputs.
        frame = _Frame()
        inputs_of_call = zip(
            graphs[0].inputs, graphs[1].inputs, labels, known, variables, strict=True
        )
        for tensor, other, label, value, variable in inputs_of_call:
            sizes = sizes_of(tensor.shape), sizes_of(other.shape)
            shapes = shapes_with(sizes, label, self.rows)
            frame[tensor.name] = _Tensor(label, shapes, value, variable)

        # Both traces must have the same operations, joined alike.
        first, second = (graph.get_operations() for graph in graphs)
        if [operation.type for operation in first] != [operation.type for operation in second]:
            raise Different("the step has other operations with twice as many rows")
        numbers = [_numbers_of_tensors(graph) for graph in graphs]
        for place in _sorted_by_inputs(first):
            pair = first[place], second[place]
            inputs = []
            for number_of, operation in zip(numbers, pair, strict=True):
                inputs.append([number_of[tensor.name] for tensor in operation.inputs])
            if inputs[0] != inputs[1]:
                raise Different(
                    "the operations of the step are joined in another way with twice as many rows"
                )
            if pair[0].outputs and pair[0].outputs[0].name in frame:
                continue
            self._places.append(place)
            self._visit(pair, frame)
            self._places.pop()
        outputs = [frame[tensor.name] for tensor in graphs[0].outputs]
        return [output.label for output in outputs], [output.value for output in outputs]

    def _visit(self, pair: tuple[Any, Any], frame: _Frame) -> None:
        """Labels the outputs of an operation."""
        operation = pair[0]
        inputs = [frame[tensor.name] for tensor in operation.inputs]
        labels = [tensor.label for tensor in inputs]
        known = [tensor.value for tensor in inputs]
        node = Node(pair, labels, known, [tensor.shapes for tensor in inputs], self.rows)
        variables = [tensor.variable for tensor in inputs]

        # Its rule gives the labels, or says why there is none.
        results: _Labels
        try:
            special = self._special(node, variables)
            results = self._result(node) if special is None else special
        except Inherited as error:
            results = error.label
        except (Mixes, NoRule) as error:
            kind = MIXED if isinstance(error, Mixes) else UNKNOWN
            results = Label(kind, operation=operation, why=str(error))

        # Each output is checked by its shape, and what mixes rows is noted where it first does.
        of_metric = any(label.of_metric for label in labels)
        for number, tensor in enumerate(operation.outputs):
            label = results[number] if isinstance(results, list) else results
            value = node.output_values[number] if node.output_values else None
            shapes = shapes_with(node.output_shapes(number), label, self.rows)
            checked = tensor.dtype.is_numpy_compatible and label.kind not in (ZERO, MIXED, UNKNOWN)
            if checked and not fits(label, shapes, self.rows):
                why = f"is labelled {label.kind}, which its shape {shapes} is not"
                label = Label(UNKNOWN, why=why)
            if label.is_bad and label.operation is None:
                label = label._replace(operation=operation)
            if label.kind == MIXED and label.operation is operation:
                self.mixed.append(label)
            if value is not None:
                shapes = value[0].shape, value[1].shape
            elif of_metric:
                label = label._replace(of_metric=True)
            variable = variables[number] if operation.type in ("Identity", "IdentityN") else None
            frame[tensor.name] = _Tensor(label, shapes, value, variable)

    def _result(self, node: Node) -> _Labels:
        """Returns the labels of what an operation without a state gives."""
        if (computed := self._computed(node)) is not None:
            node.output_values.extend(computed)
            return [label_of_values(*pair, self.rows) for pair in computed]
        if node.type in RULES:
            results = RULES[node.type](node)
            node.refuse_unread()
            if node.type == "Identity":
                node.output_values.extend(node.known)
            return results
        if node.operations[0].op_def.is_stateful and node.type not in _HARMLESS:
            raise NoRule(_of_state(node.type))
        if all(node.label(number).is_same for number in range(len(node.labels))):
            first, second = (operation.node_def.attr for operation in node.operations)
            for name in first:
                if not _IGNORED.match(name) and first[name] != second[name]:
                    raise NoRule(f"{name} follows from the number of rows")
            return Label(SAME)
        if _DRAWS.search(node.type):
            raise Mixes("draws the same numbers on each replica, by their places in its rows")
        raise NoRule("has no rule")

    def _computed(self, node: Node) -> list[Values] | None:
        """Returns the values of the outputs, if they follow from constants and shapes alone."""
        if node.type == "Const":
            outputs = [operation.outputs[0] for operation in node.operations]
            first, second = map(np.asarray, map(tf.get_static_value, outputs))
            return [(first, second)]
        if node.type == "Minimum" and (limits := _clamped(node)):
            return [limits]
        if node.type not in ("Shape", "ShapeN", "Size", "Rank"):
            return node.constants()
        if any(shape is None or None in shape for shape in itertools.chain(*node.shapes)):
            return None
        kinds: dict[str, Callable[[Any], Any]] = {"Size": math.prod, "Rank": len}
        make = kinds.get(node.type, np.asarray)
        dtype = node.dtype.as_numpy_dtype

        def values(shapes: Shapes) -> Values:
            return np.asarray(make(shapes[0]), dtype), np.asarray(make(shapes[1]), dtype)

        return [*map(values, node.shapes)]

    def _special(self, node: Node, variables: Sequence[Variable | None]) -> _Labels | None:
        """Returns the outputs of marks, calls, conditions, loops and operations on variables.

        It is None for others.
        """
        # The names of marks are those of `trainer.run.traced_step`.
        operation = node.operations[0]
        mark = re.sub(r"_\d+$", "", operation.name.rpartition("/")[2])
        # What a layer gives for texts, and the texts: the first has their rows.
        if mark == BY_ROW and node.label(1).has_rows and node.label(1).axis == 0:
            return [node.label(1), node.label(1)]
        if node.type == "Identity":
            if mark == DRAWN:
                return Label(ROWS)
            if mark == NUMBER:
                raise Mixes("reads the number of this replica")
            if mark == SUMMED:
                label = node.label(0)
                if label.has_rows:
                    raise Mixes("adds the rows of replicas up place by place")
                return label if label.kind == ZERO else label.as_sum()._replace(kind=SAME)

        # A call, a condition or a loop has graphs of its own.
        if node.type == "Placeholder":
            raise NoRule("is fed from outside")
        if node.type in _CALLS:
            (graphs,) = self._graphs(node, "f")
            labels, values = self.graphs(graphs, node.labels, node.known, variables)
            node.output_values.extend(values)
            return labels
        if node.type in _BRANCHES:
            return self._condition(node, variables)
        if node.type in _LOOPS:
            return self._loop(node, variables)

        # Operations on variables, and others that have a state, are left.
        variable = variables[0] if variables else None
        if node.type == "VariableShape" and variable is not None:
            shape = np.asarray(variable.shape, node.dtype.as_numpy_dtype)
            node.output_values.append((shape, shape))
            return Label(SAME)
        if not operation.op_def.is_stateful or node.type in _HARMLESS:
            return None
        if variable is not None and (node.type == "ReadVariableOp" or _ASSIGNS.match(node.type)):
            return self._of_variable(node, variable, variables)
        plain = variable is not None and not (variable.is_metric or variable.own_value)
        if plain and node.type == "ResourceGather" and not node.attribute("batch_dims"):
            letters = range(node.rank(1))
            return label_by_letters(node, Axes({1: letters}, letters))
        self.stateful.append(Label(UNKNOWN, operation=operation, why=_of_state(node.type)))
        return None

    def _of_variable(
        self, node: Node, variable: Variable, variables: Sequence[Variable | None]
    ) -> Label:
        """Returns the outputs of an operation that reads or assigns a variable."""
        if variable.own_value:
            raise NoRule(f"uses {variable.name}, of which each replica has a value of its own")
        if node.type != "ReadVariableOp":
            pairs = zip(node.labels, variables, strict=True)
            labels = [label for label, assigned in pairs if assigned is None] or [Label(SAME)]
            for assigned in filter(None, variables):
                self.assignments += [self._assignment(node, assigned, label) for label in labels]
        return Label(SUM, of_metric=True) if variable.is_metric else Label(SAME)

    def _assignment(self, node: Node, variable: Variable, label: Label) -> Assignment:
        """Returns what a variable is given.

        The label is bad unless every replica gives what it must.
        """
        # The sum of a metric, or a combined variable, takes what has the power of its combination.
        operation = node.operations[0]
        plain = node.type.startswith("Assign")
        why = ""
        if self._doubt:
            label = self._doubt[-1]
        elif not label.is_bad and label.kind != ZERO:
            as_sum = label.as_sum()
            combination = variable.combined if plain else ""
            if variable.is_metric:
                combination = "sum"
            combined = {"mean": -1, "sum": 0}.get(combination)
            if variable.mean is not None and as_sum.kind == SUM:
                combined = self._powers.setdefault(variable.mean, as_sum.power)
            if combined is not None:
                good = as_sum.kind == SUM and as_sum.power == combined
            else:
                good = label.kind == SAME and label.power == 0
            if not good:
                what = "a sum over the rows of one replica, which is not added up over the replicas"
                if label.has_rows:
                    what = "the rows of one replica"
                elif label.kind == SAME or combined is not None:
                    what = "what differs with the number of replicas by a factor"
                why = f"gives {variable.name} {what}"

        # No other variable may follow from the counts of one replica.
        if variable.is_metric is False and label.of_metric and not why and not label.is_bad:
            why = "is computed from a metric, of which each replica has counts of its own"
        if why:
            label = Label(MIXED, operation=operation, why=why)
        return Assignment(variable, operation, label, self._places[0])

    def _graphs(self, node: Node, *attributes: str) -> list[tuple[Any, Any]]:
        """Returns the graphs of the functions that attributes name, in both traces."""
        pairs: list[tuple[Any, Any]] = []
        for attribute in attributes:
            graphs = []
            for operation in node.operations:
                names = [function.name for function in np.ravel(operation.get_attr(attribute))]
                functions = [graph_of_function(operation.graph, name) for name in names]
                if None in functions:
                    raise NoRule("calls a function whose graph TensorFlow does not keep")
                graphs.append(functions)
            pairs += zip(*graphs, strict=True)
        return pairs

    def _condition(self, node: Node, variables: Sequence[Variable | None]) -> _Labels:
        """Returns what both branches give."""
        branches = self._graphs(node, *_BRANCHES[node.type])
        doubt = self._doubt_of(node.labels[0], node, "a condition")
        self._doubt += doubt
        results = []
        # A condition that is a constant, the same in both traces, has one branch.
        if node.known[0] and "If" in node.type and not doubt:
            condition, _ = node.known[0]
            branches = [branches[0 if condition else 1]]
        for pair in branches:
            labels, _ = self.graphs(pair, node.labels[1:], node.known[1:], variables[1:])
            results.append(labels)
        if doubt:
            return self._doubt.pop()
        return [functools.reduce(joined, of_branches) for of_branches in zip(*results, strict=True)]

    def _loop(self, node: Node, variables: Sequence[Variable | None]) -> _Labels:
        """Returns what a loop carries in the end."""
        body, condition = self._graphs(node, "body", "cond")
        ends = zip(body[0].inputs, body[0].outputs, strict=True)
        constant = [start is end for start, end in ends]
        known = [value if same else None for value, same in zip(node.known, constant, strict=True)]

        # Turns are walked until no label changes any more; only the last one counts.
        labels = list(node.labels)
        for _ in range(_MOST_TURNS):
            before = len(self.assignments), len(self.mixed), len(self.stateful)
            (decides,), _ = self.graphs(condition, labels, known, variables)
            doubt = self._doubt_of(decides, node, "the end of a loop")
            self._doubt += doubt
            after, _ = self.graphs(body, labels, known, variables)
            del self._doubt[len(self._doubt) - len(doubt) :]
            carried = [joined(*both) for both in zip(labels, after, strict=True)]
            if carried == labels:
                return doubt[0] if doubt else labels
            labels = carried
            del self.assignments[before[0] :], self.mixed[before[1] :], self.stateful[before[2] :]
        raise NoRule("is a loop whose labels go on changing")

    def _doubt_of(self, label: Label, node: Node, what: str) -> list[Label]:
        """Returns the label of what depends on a condition that may differ on replicas, if any."""
        if label.is_bad:
            return [label]
        if label.kind in (SAME, ZERO) and not label.power and not label.of_metric:
            return []
        why = f"{what} follows from the rows of one replica"
        return [Label(MIXED, operation=node.operations[0], why=why)]


def _clamped(node: Node) -> Values | None:
    """Returns the value of min(max(number, c), c), which is c, as Keras counts classes.

    It is None for another minimum.
    """
    if node.shapes[0] != node.shapes[1]:
        return None
    for number in (0, 1):
        others = [operation.inputs[1 - number].op for operation in node.operations]
        pairs = zip(others, node.known[number] or (), strict=False)
        clamped = []
        for other, limit in pairs:
            if other.type == "Maximum":
                bounds = map(tf.get_static_value, other.inputs)
                clamped.append(any(np.array_equal(bound, limit) for bound in bounds))
        if clamped and all(clamped):
            return node.known[number]
    return None


def _of_state(kind: str) -> str:
    """Returns why nothing is known of an operation with a state."""
    if _DRAWS.search(kind):
        return "draws from TensorFlow's own state, which differs on each replica"
    return "keeps a state of its own, or has effects that the graph does not show"


def _sorted_by_inputs(operations: Sequence[Any]) -> list[int]:
    """Returns the places of operations, each after those that it takes inputs of.

    In a graph an operation of a loop may stand before some of its inputs.
    """
    place_of = {operation: place for place, operation in enumerate(operations)}
    done: dict[int, None] = {}
    waiting = [*reversed(operations)]
    while waiting:
        operation = waiting[-1]
        before = [tensor.op for tensor in operation.inputs if place_of[tensor.op] not in done]
        if not before:
            done[place_of[waiting.pop()]] = None
        waiting += before
    return [*done]


def _numbers_of_tensors(graph: Any) -> dict[str, int]:
    """Returns the number of each tensor of a graph, in the order of its operations, by name."""
    tensors = itertools.chain(*(operation.outputs for operation in graph.get_operations()))
    return {tensor.name: number for number, tensor in enumerate(tensors)}
