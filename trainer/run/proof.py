"""Says whether the step of a run gives on several replicas what one device with all rows would
give, by its graph."""

import itertools
import linecache
import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer.base.settings.train_config import TrainConfig
from trainer.data.dataset import Dataset
from trainer.invariance.gradients import optimizers_of, reachable
from trainer.invariance.internals import all_layers, plain_variables
from trainer.proof.labels import MIXED, ROWS, SAME, Label, label_of_values
from trainer.proof.walk import Different, Variable, Walk
from trainer.run.traced_step import REPLICAS, StepTrace, trace
from trainer.run.traced_step import __file__ as trace_file

PROVED = "proved"
MIXES = "mixes rows"
MAY_MIX = "may mix rows"
NOT_PROVED = "not proved"


@dataclass(frozen=True)
class Proof:
    """Holds what the graph shows.

    The first three lists are empty if every update is that of one device.
    """

    # what mixes rows, with the line of the user's file
    mixes: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)  # what has no rule
    parts: list[str] = field(default_factory=list)  # variables that each micro-batch assigns
    # metrics that mix rows, which changes no update
    metrics: list[str] = field(default_factory=list)

    @property
    def lines(self) -> list[str]:
        """Returns what is not proved.

        What has no rule is left out where something mixes rows for sure.
        """
        return [*self.mixes, *self.parts, *([] if self.mixes else self.unknown)]

    @property
    def holds(self) -> bool:
        """Returns whether every update is proved."""
        return not (self.mixes or self.unknown or self.parts)

    def verdict(self, *, differ: bool = False) -> str:
        """Returns the verdict in a few words.

        differ: whether steps on one and on two replicas gave other numbers.
        """
        if self.mixes and differ:
            return MIXES
        if self.mixes or self.parts:
            return MAY_MIX
        return NOT_PROVED if self.unknown else PROVED


def prove_built(config: TrainConfig, dataset: Dataset, model: keras.Model) -> Proof:
    """Returns what `prove` does for a model that is built and prepared.

    Its variables stay as they are.
    """
    with copied_variables(model):
        return prove(config, dataset, model)


def copied_variables(model: keras.Model) -> AbstractContextManager[None]:
    """Gives the model, its metrics and optimizers copies of their variables for a block."""
    used = _used_variables(model)
    variables = [variable for variable in used if isinstance(variable, keras.Variable)]
    return plain_variables(variables, optimizers_of(model))


def prove(config: TrainConfig, dataset: Dataset, model: keras.Model | None = None) -> Proof:
    """Traces the step of a run twice and returns what its graph shows.

    Raises UserError as building the model does. The settings --sync_batch_norm=false and
    --micro_batches, which ask batch norm for fewer rows, are left out. model: one with plain
    variables, if it is not to be built anew.
    """
    traces = [trace(config, dataset, count, REPLICAS, model) for count in (REPLICAS, REPLICAS // 2)]
    try:
        walk = _walked(traces[0], traces[1])
    except Different as error:
        return Proof(unknown=[str(error)])
    parts = _assigned_in_parts(walk, traces[0]) if config.micro_batches > 1 else []
    return Proof(**_findings(walk), parts=parts)


def _assigned_in_parts(walk: Walk, first: StepTrace) -> list[str]:
    """Returns lines about variables that each micro-batch assigns.

    Metrics and the averages of batch norm are left out. Keras's own train_step has no call of
    `accumulate`, and then only its optimizer's updates come after all of them.
    """
    averages: set[str] = set()
    for layer in all_layers(first.model):
        if isinstance(layer, keras.layers.BatchNormalization):
            averages |= {variable.path for variable in layer.non_trainable_variables}
    names = []
    for assignment in walk.assignments:
        variable = assignment.variable
        if variable.is_metric or variable.updated or variable.name in averages:
            continue
        inside = any(assignment.place in places for places in first.micro_batches)
        if inside or not first.micro_batches:
            names.append(variable.name)
    unique = dict.fromkeys(names)
    return [f"{name} is assigned in each micro-batch, not once a step" for name in unique]


def _walked(*traces: StepTrace) -> Walk:
    """Labels both traces. Raises Different if they do not fit each other."""
    walk = Walk((traces[0].rows, traces[1].rows))
    variables = [_variables_by_handle(trace.model) for trace in traces]

    # Each input of the graph gets a label, its values in both traces, and the variable it stands
    # for, if they are known.
    labels: list[Label] = []
    known: list[Any] = []
    references: list[Variable | None] = []
    captured = [
        {id(inside): outside for outside, inside in trace.graph.captures} for trace in traces
    ]
    for first, second in zip(traces[0].graph.inputs, traces[1].graph.inputs, strict=True):
        # An argument is the rows, (1, batches of the step, rows, …), or the step's number.
        if id(first) not in captured[0]:
            labels.append(Label(ROWS, axis=2) if first.shape.rank else Label(SAME))
            known.append(None)
            references.append(None)
            continue

        # A captured tensor has values now, and its label is found by comparing both traces.
        outside = captured[0][id(first)], captured[1][id(second)]
        if first.dtype.is_numpy_compatible:
            values = np.asarray(outside[0].numpy()), np.asarray(outside[1].numpy())
            labels.append(label_of_values(*values, walk.rows))
            known.append(values)
            references.append(None)
            continue

        # A handle stands for a variable, which must start alike in both.
        pair = [named.get(id(tensor)) for named, tensor in zip(variables, outside, strict=True)]
        labels.append(Label(SAME))
        known.append(None)
        references.append(pair[0][0] if pair[0] else None)
        if pair[0] and pair[1]:
            values = pair[0][1].numpy(), pair[1][1].numpy()
            if pair[0][0] != pair[1][0] or not np.array_equal(*values):
                raise Different(
                    f"{pair[0][0].name} starts from other values with another number of replicas"
                )
    walk.graphs((traces[0].graph, traces[1].graph), labels, known, references)
    return walk


def _used_variables(model: keras.Model) -> list[Any]:
    """Returns the variables that a step may use, each once.

    They include those of metrics and of optimizers.
    """
    owners = [model, *model.metrics, *optimizers_of(model)]
    used = [*_variables_of(owners), *reachable(model)]
    variables = {id(item): item for item in used if isinstance(item, (keras.Variable, tf.Variable))}
    return [*variables.values()]


def _variables_of(owners: Iterable[Any]) -> Iterator[Any]:
    """Returns the variables of models, metrics or optimizers."""
    return itertools.chain.from_iterable(owner.variables for owner in owners)


def _variables_by_handle(model: keras.Model) -> dict[int, tuple[Variable, Any]]:
    """Returns the variables that a step may use, and their values, by ids of handles."""
    # The optimizers decide how their own variables and the trained ones are updated.
    metrics = {*map(id, _variables_of(model.metrics))}
    means: dict[int, int] = {}
    for number, metric in enumerate(model.metrics):
        if isinstance(metric, keras.metrics.Mean):
            means.update(dict.fromkeys(map(id, metric.variables), number))
    updated = {*map(id, _variables_of(optimizers_of(model))), *map(id, model.trainable_variables)}
    variables: dict[int, tuple[Variable, Any]] = {}
    for variable in _used_variables(model):
        value = variable.value if isinstance(variable, keras.Variable) else variable
        is_metric = id(variable) in metrics
        is_updated = id(variable) in updated
        by_replica = value.synchronization == tf.VariableSynchronization.ON_READ
        words = {tf.VariableAggregation.MEAN: "mean", tf.VariableAggregation.SUM: "sum"}
        about = Variable(
            name=getattr(variable, "path", variable.name),
            is_metric=is_metric,
            mean=means.get(id(variable)),
            own_value=by_replica and not is_metric,
            combined="" if is_updated else words.get(value.aggregation, ""),
            updated=is_updated,
            shape=tuple(value.shape),
        )
        variables.setdefault(id(value.handle), (about, value))
    return variables


# What to write instead, by what the line of the user's file does.
_ADVICE = (
    (
        "global_norm|clip_by_norm",
        "give the optimizer global_clipnorm (or clipnorm), which clips the sum",
    ),
    ("metric", "compute it from this step's rows instead"),
    (
        "losses/dice|losses/tversky|/dice/|/tversky/",
        "axis=(1, 2, 3) makes this loss one of each row, of which the mean is taken",
    ),
    (
        "divides by a sum|ratio",
        "a sum over a mask's sum is the reduction mean_with_sample_weight of a loss",
    ),
    (
        "combines rows and a sum",
        "normalise by BatchNormalization, which knows all replicas, or by each row's own values",
    ),
    ("pairs", "a loss of pairs needs all rows on one device: --replicas=1"),
    (
        "over the rows of one replica",
        "use a mean over rows, or a constant, instead of what the whole batch decides",
    ),
    ("number of this replica", "draw by current_step() or keras.random, which know the rows"),
    (
        "TensorFlow's own state",
        "draw by keras.random (normal, uniform, randint) or a layer, such as GaussianNoise",
    ),
    ("not linear in a sum", "use a loss that is a mean of one value a row"),
    (
        "by a factor|divided by the rows",
        "take the mean over the rows at hand, or divide by the GLOBAL batch",
    ),
)


def _findings(walk: Walk) -> dict[str, list[str]]:
    """Returns what the assignments of a step show, as a Proof holds it."""
    findings: dict[str, list[str]] = {"mixes": [], "unknown": [], "metrics": []}
    for assignment in walk.assignments:
        label = assignment.label
        if not label.is_bad:
            continue
        kind = "mixes" if label.kind == MIXED else "unknown"
        if assignment.variable.is_metric:
            kind = "metrics"
        findings[kind].append(_line(label, walk.mixed, assignment.variable.name))
    findings["unknown"] += [_line(label, []) for label in walk.stateful]
    # A line about an update is not repeated for a metric, such as the mean of the loss.
    of_updates = {*findings["mixes"], *findings["unknown"]}
    findings["metrics"] = [line for line in findings["metrics"] if line not in of_updates]
    return {kind: [*dict.fromkeys(lines)] for kind, lines in findings.items()}


def _line(label: Label, mixed: list[Label], name: str = "") -> str:
    """Returns a line about a label's operation: the user's file and line, and some advice."""
    chosen = label
    # The user wrote no line of a gradient; its forward pass says more.
    if label.kind == MIXED and not _frames(label.operation):
        scope = label.operation.name.removeprefix("gradient_tape/").rpartition("/")[0]
        others = [other for other in mixed if _frames(other.operation)]
        scopes = [other.operation.name.rpartition("/")[0] for other in others]
        near = [other for other, name in zip(others, scopes, strict=True) if name.startswith(scope)]
        chosen = next(iter(near or others), label)
    operation = chosen.operation
    frames = _frames(operation)
    where = "{}:{}: {}".format(*frames[-1]) if frames else operation.name
    about = f"{where}: {operation.type} {chosen.why}"
    text = f"{operation.name} {where} {chosen.why}{' metric' * chosen.of_metric}"
    advice = next((advice for words, advice in _ADVICE if re.search(words, text)), "")
    if (advice and chosen.kind == MIXED) or "draws" in chosen.why:
        return f"{about}: {advice}"
    return about


def _frames(operation: Any) -> list[tuple[str, int, str]]:
    """Returns (file, line, text) of the user's files in which an operation was made, the innermost
    last."""
    frames = [(frame.filename, frame.lineno) for frame in operation.traceback or ()]
    ours = [place for place, (file, _) in enumerate(frames) if file == trace_file]
    frames = frames[ours[-1] :] if ours else frames
    libraries = ("site-packages", "/trainer/", "<", "/lib/python3")
    users = [(file, line) for file, line in frames if not any(part in file for part in libraries)]
    return [(file, line, linecache.getline(file, line).strip()) for file, line in users]
