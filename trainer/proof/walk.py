"""Walks through the graphs of both traces at once and labels every tensor: see
`trainer.proof.labels`.

Functions are walked where they are called, both branches of a condition count, and a loop is walked
until the labels of what it carries stay as they are.
"""

import functools
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
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_BRANCHES = {
    "If": ("then_branch", "else_branch"),
    "StatelessIf": ("then_branch", "else_branch"),
    "Case": ("branches",),
    "StatelessCase": ("branches",),
}
_LOOPS = ("While", "StatelessWhile")
_Outputs = tuple[list[Label], list[Values | None]]  # labels, and values where they are known
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
    own_value: bool = False  # whether each replica keeps a value of its own
    # "mean" or "sum", if the values of the replicas are combined where they are assigned
    combined: str = ""
    updated: bool = False  # whether an optimizer updates it, or keeps it
    shape: tuple[int, ...] = ()


class Assignment(NamedTuple):
    """Describes what a variable is given: the label is that of the worst value among an operation's
    inputs."""

    variable: Variable
    operation: Any
    label: Label
    place: int  # of the operation of the step that makes it, among all of them


@dataclass
class _Frame:
    """Holds what is known of the tensors of one call of a function, by the names that the first
    trace gives them."""

    labels: dict[str, Label] = field(default_factory=dict)
    known: dict[str, Values] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    shapes: dict[str, Shapes] = field(default_factory=dict)


@dataclass
class Walk:
    """Labels the tensors of two traces with so many rows, and collects what their operations
    assign."""

    rows: tuple[int, int]
    assignments: list[Assignment] = field(default_factory=list)
    # of the operations that mix rows, in the order of the graph
    mixed: list[Label] = field(default_factory=list)
    # of operations with a state and without a rule
    stateful: list[Label] = field(default_factory=list)
    # of the conditions and loops around, if they are bad
    _doubt: list[Label] = field(default_factory=list)
    # of the operations that call what is visited, the outermost first
    _places: list[int] = field(default_factory=list)

    def graphs(
        self,
        graphs: tuple[Any, Any],
        labels: Sequence[Label],
        known: Sequence[Values | None],
        variables: Sequence[Variable | None],
    ) -> _Outputs:
        """Labels all tensors of two graphs, given what their inputs are; returns the labels and
        values of outputs.

        Raises Different if the graphs do not have the same operations in the same order.
        """
        frame = _Frame()
        given = zip(graphs[0].inputs, graphs[1].inputs, labels, known, variables, strict=True)
        for tensor, other, label, value, variable in given:
            frame.labels[tensor.name] = label
            frame.shapes[tensor.name] = shapes_with(
                (sizes_of(tensor.shape), sizes_of(other.shape)), label, self.rows
            )
            if value is not None:
                frame.known[tensor.name] = value
            if variable is not None:
                frame.variables[tensor.name] = variable
        first, second = (graph.get_operations() for graph in graphs)
        if [operation.type for operation in first] != [operation.type for operation in second]:
            raise Different("the step has other operations with twice as many rows")
        places_of = [
            {tensor.name: place for place, tensor in enumerate(_tensors(graph))} for graph in graphs
        ]
        for place in _in_order(first):
            pair = first[place], second[place]
            wired = zip(places_of, pair, strict=True)
            inputs = [[of[tensor.name] for tensor in operation.inputs] for of, operation in wired]
            if inputs[0] != inputs[1]:
                raise Different(
                    "the operations of the step are joined in another way with twice as many rows"
                )
            if pair[0].outputs and pair[0].outputs[0].name in frame.labels:
                continue
            self._places.append(place)
            self._visit(pair, frame)
            self._places.pop()
        names = [tensor.name for tensor in graphs[0].outputs]
        return [frame.labels[name] for name in names], [frame.known.get(name) for name in names]

    def _visit(self, pair: tuple[Any, Any], frame: _Frame) -> None:
        """Labels the outputs of an operation."""
        operation = pair[0]
        count = len(pair[0].outputs)
        names = [tensor.name for tensor in operation.inputs]
        labels = [frame.labels[name] for name in names]
        known = [frame.known.get(name) for name in names]
        node = Node(pair, labels, known, [frame.shapes[name] for name in names], self.rows)
        variables = [frame.variables.get(name) for name in names]
        values: list[Values | None] = [None] * count
        try:
            results, values = self._special(node, variables) or self._result(node)
        except Inherited as error:
            results = [error.label] * count
        except (Mixes, NoRule) as error:
            kind = MIXED if isinstance(error, Mixes) else UNKNOWN
            results = [Label(kind, operation=operation, why=str(error))] * count
        of_metric = any(label.of_metric for label in labels)
        for number, (tensor, label, value) in enumerate(
            zip(operation.outputs, results, values, strict=True)
        ):
            shapes = shapes_with(node.output_shapes(number), label, self.rows)
            checked = tensor.dtype.is_numpy_compatible and label.kind not in (ZERO, MIXED, UNKNOWN)
            if checked and not fits(label, shapes, self.rows):
                label = Label(
                    UNKNOWN, why=f"is labelled {label.kind}, which its shape {shapes} is not"
                )
            if label.is_bad and label.operation is None:
                label = label._replace(operation=operation)
            if label.kind == MIXED and label.operation is operation:
                self.mixed.append(label)
            frame.labels[tensor.name] = label._replace(
                of_metric=label.of_metric or (of_metric and value is None)
            )
            frame.shapes[tensor.name] = shapes
            if value is not None:
                frame.shapes[tensor.name] = value[0].shape, value[1].shape
                frame.known[tensor.name] = value
        if operation.type in ("Identity", "IdentityN"):
            for tensor, variable in zip(operation.outputs, variables, strict=True):
                if variable is not None:
                    frame.variables[tensor.name] = variable

    def _result(self, node: Node) -> _Outputs:
        """Returns the labels and values of what an operation without a state gives."""
        operation = node.operations[0]
        count = len(node.operations[0].outputs)
        if (computed := self._computed(node)) is not None:
            return [label_of_values(*pair, self.rows) for pair in computed], [*computed]
        if node.type in RULES:
            results = RULES[node.type](node)
            node.refuse_unread()
            value = node.known[0] if node.type == "Identity" else None
            return results[:count] if isinstance(results, list) else [results] * count, [
                value
            ] * count
        if operation.op_def.is_stateful and node.type not in _HARMLESS:
            raise NoRule(_of_state(node.type))
        if all(node.label(number).is_same for number in range(len(node.labels))):
            self._refuse_other_attributes(node)
            return [Label(SAME)] * count, [None] * count
        if _DRAWS.search(node.type):
            raise Mixes("draws the same numbers on each replica, by their places in its rows")
        raise NoRule("has no rule")

    def _computed(self, node: Node) -> list[Values] | None:
        """Returns the values of the outputs, if they follow from constants and shapes alone."""
        if node.type == "Const":
            first, second = (
                tf.get_static_value(operation.outputs[0]) for operation in node.operations
            )
            return [(np.asarray(first), np.asarray(second))]
        if node.type == "Minimum" and (limits := _clamped(node)):
            return [limits]
        if node.type not in ("Shape", "ShapeN", "Size", "Rank"):
            return node.constants()
        if any(shape is None or None in shape for pair in node.shapes for shape in pair):
            return None
        kinds: dict[str, Callable[[Any], Any]] = {"Size": math.prod, "Rank": len}
        make = kinds.get(node.type, np.asarray)
        dtype = node.operations[0].outputs[0].dtype.as_numpy_dtype
        return [
            (np.asarray(make(first), dtype), np.asarray(make(second), dtype))
            for first, second in node.shapes
        ]

    def _refuse_other_attributes(self, node: Node) -> None:
        """Raises NoRule if an operation without a rule has other attributes in the other trace."""
        first, second = (operation.node_def.attr for operation in node.operations)
        for name in first:
            if not _IGNORED.match(name) and first[name] != second[name]:
                raise NoRule(f"{name} follows from the number of rows")

    def _special(self, node: Node, variables: Sequence[Variable | None]) -> _Outputs | None:
        """Returns the outputs of marks, calls, conditions, loops and operations on variables; None
        for others."""
        operation = node.operations[0]
        count = len(node.operations[0].outputs)
        nothing: list[Values | None] = [None] * count
        if node.type == "Identity" and (mark := _mark(operation)):
            return [self._marked(node, mark)], nothing
        if node.type == "Placeholder":
            raise NoRule("is fed from outside")
        if node.type in _CALLS:
            return self.graphs(self._graphs(node, "f"), node.labels, node.known, variables)
        if node.type in _BRANCHES:
            return self._condition(node, variables), nothing
        if node.type in _LOOPS:
            return self._loop(node, variables), nothing
        variable = variables[0] if variables else None
        if node.type == "VariableShape" and variable is not None:
            shape = np.asarray(variable.shape, operation.outputs[0].dtype.as_numpy_dtype)
            return [Label(SAME)], [(shape, shape)]
        if not operation.op_def.is_stateful or node.type in _HARMLESS:
            return None
        if variable is not None and (node.type == "ReadVariableOp" or _ASSIGNS.match(node.type)):
            return self._of_variable(node, variables), nothing
        plain = variable is not None and not (variable.is_metric or variable.own_value)
        if plain and node.type == "ResourceGather" and not node.attribute("batch_dims"):
            letters = range(node.rank(1))
            return [label_by_letters(node, Axes({1: letters}, letters))], nothing
        self.stateful.append(Label(UNKNOWN, operation=operation, why=_of_state(node.type)))
        return None

    def _marked(self, node: Node, mark: str) -> Label:
        """Returns the label of a marked tensor: see `trainer.run.one_of_several`."""
        if mark == DRAWN:
            return Label(ROWS)
        if mark == NUMBER:
            raise Mixes("reads the number of this replica")
        label = node.label(0)
        if label.has_rows:
            raise Mixes("adds the rows of replicas up place by place")
        return label if label.kind == ZERO else label.as_sum()._replace(kind=SAME)

    def _of_variable(self, node: Node, variables: Sequence[Variable | None]) -> list[Label]:
        """Returns the outputs of an operation that reads or assigns a variable."""
        variable = variables[0]
        assert variable is not None
        if variable.own_value:
            raise NoRule(f"uses {variable.name}, of which each replica has a value of its own")
        if node.type != "ReadVariableOp":
            given = [
                label for label, held in zip(node.labels, variables, strict=True) if held is None
            ]
            for held in filter(None, variables):
                self.assignments += [
                    self._assignment(node, held, label) for label in given or [Label(SAME)]
                ]
        return [Label(SUM, of_metric=True) if variable.is_metric else Label(SAME)] * len(
            node.operations[0].outputs
        )

    def _assignment(self, node: Node, variable: Variable, label: Label) -> Assignment:
        """Returns what a variable is given, with a label that is bad unless every replica gives
        what it must."""
        operation = node.operations[0]
        plain = node.type.startswith("Assign")
        why = ""
        if self._doubt:
            label = self._doubt[-1]
        elif not label.is_bad and label.kind != ZERO:
            as_sum = label.as_sum()
            combined = {"mean": -1, "sum": 0}.get(
                "sum" if variable.is_metric else variable.combined if plain else ""
            )
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
        if variable.is_metric is False and label.of_metric and not why and not label.is_bad:
            why = "is computed from a metric, of which each replica has counts of its own"
        if why:
            label = Label(MIXED, operation=operation, why=why)
        return Assignment(variable, operation, label, self._places[0])

    def _graphs(self, node: Node, attribute: str, place: int | None = None) -> tuple[Any, Any]:
        """Returns the graphs of a function that an attribute names, in both traces."""
        named = [operation.get_attr(attribute) for operation in node.operations]
        names = [(of if place is None else of[place]).name for of in named]
        pairs = zip(node.operations, names, strict=True)
        first, second = (graph_of_function(operation.graph, name) for operation, name in pairs)
        return first, second

    def _condition(self, node: Node, variables: Sequence[Variable | None]) -> list[Label]:
        """Returns what both branches give."""
        doubt = self._doubt_of(node.labels[0], node.operations[0], "a condition")
        self._doubt += doubt
        pairs = []
        for attribute in _BRANCHES[node.type]:
            several = (
                range(len(node.operations[0].get_attr(attribute)))
                if attribute == "branches"
                else [None]
            )
            pairs += [self._graphs(node, attribute, place) for place in several]
        found = [
            self.graphs(pair, node.labels[1:], node.known[1:], variables[1:])[0] for pair in pairs
        ]
        if doubt:
            self._doubt.pop()
            return doubt * len(node.operations[0].outputs)
        return [functools.reduce(joined, labels) for labels in zip(*found, strict=True)]

    def _loop(self, node: Node, variables: Sequence[Variable | None]) -> list[Label]:
        """Returns what a loop carries in the end."""
        body = self._graphs(node, "body")
        condition = self._graphs(node, "cond")
        inputs = body[0].inputs
        outputs = body[0].outputs
        kept = [given is result for given, result in zip(inputs, outputs, strict=True)]
        known = [value if same else None for value, same in zip(node.known, kept, strict=True)]
        labels = list(node.labels)
        for _ in range(_MOST_TURNS):
            before = len(self.assignments), len(self.mixed), len(self.stateful)
            (decides,), _ = self.graphs(condition, labels, known, variables)
            doubt = self._doubt_of(decides, node.operations[0], "the end of a loop")
            self._doubt += doubt
            after, _ = self.graphs(body, labels, known, variables)
            del self._doubt[len(self._doubt) - len(doubt) :]
            carried = [joined(*both) for both in zip(labels, after, strict=True)]
            if carried == labels:
                return [doubt[0]] * len(labels) if doubt else labels
            labels = carried
            del self.assignments[before[0] :], self.mixed[before[1] :], self.stateful[before[2] :]
        raise NoRule("is a loop whose labels go on changing")

    def _doubt_of(self, label: Label, operation: Any, what: str) -> list[Label]:
        """Returns the label of what depends on a condition, if that may differ with the number of
        replicas."""
        if label.is_bad:
            return [label]
        if label.kind in (SAME, ZERO) and not label.power and not label.of_metric:
            return []
        return [
            Label(MIXED, operation=operation, why=f"{what} follows from the rows of one replica")
        ]


def _clamped(node: Node) -> Values | None:
    """Returns the value of min(max(values, c), c), which is c, as Keras counts classes; None for
    another minimum."""
    for number in (0, 1):
        others = [operation.inputs[1 - number].op for operation in node.operations]
        pairs = zip(others, node.known[number] or (), strict=False)
        bounds = [
            [*map(tf.get_static_value, other.inputs), limit]
            for other, limit in pairs
            if other.type == "Maximum"
        ]
        if bounds and all(any(np.array_equal(bound, of[-1]) for bound in of[:-1]) for of in bounds):
            return node.known[number]
    return None


def _of_state(kind: str) -> str:
    """Returns why nothing is known of an operation with a state."""
    if _DRAWS.search(kind):
        return "draws from TensorFlow's own state, which differs on each replica"
    return "keeps a state of its own, or has effects that the graph does not show"


def _mark(operation: Any) -> str:
    """Returns the mark that an identity operation is, or ""."""
    name = re.sub(r"_\d+$", "", operation.name.rpartition("/")[2])
    return name if name in (DRAWN, NUMBER, SUMMED) else ""


def _in_order(operations: Sequence[Any]) -> list[int]:
    """Returns the places of operations, each after those that it takes inputs of: a loop may get
    some later."""
    place_of = {operation: place for place, operation in enumerate(operations)}
    order: dict[int, None] = {}
    waiting = [*reversed(operations)]
    while waiting:
        operation = waiting[-1]
        before = [tensor.op for tensor in operation.inputs if place_of[tensor.op] not in order]
        if not before:
            order[place_of[waiting.pop()]] = None
        waiting += before
    return [*order]


def _tensors(graph: Any) -> list[Any]:
    """Returns all tensors of a graph in the order of its operations."""
    return [tensor for operation in graph.get_operations() for tensor in operation.outputs]
