"""Finds, on a CPU, where a GPU would make the host wait in the loop over steps, from TensorFlow's registry of kernels.

The PyPI wheel registers its GPU kernels on every machine, with those of their inputs and outputs that lie in the
host's memory. A tensor that a kernel writes to the device's memory and another one reads on the host is copied, and the
host waits for all that the device was asked to do before.

Logical CPUs from number 1 on stand for GPUs, and CPU:0 is the host. What runs on a real GPU differs in this: the layout
of convolutions and fused kernels are the business of later passes, which add no wait, and TensorFlow places what no
strategy has placed by rules that are only approximated here: on the GPU if it has the kernel.
"""

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import config_pb2, meta_graph_pb2
from tensorflow.python.framework import kernels, meta_graph, op_def_registry
from tensorflow.python.grappler import tf_optimizer

HOST = "CPU:0"
# What grappler does for every device: calls become part of the graph, loops become their frames, constants are folded.
_PASSES = ("function", "constfold", "pruning", "dependency", "common_subgraph_elimination")
# They stay with the resource that they read from, which is on the host.
_OF_THE_HOST = {"IteratorGetNext", "Placeholder", "_Arg", "NoOp"}
_UPDATES = ("Assign", "ResourceApply", "ResourceScatter")
# No kernel is started for them.
_FREE = {
    "Const", "Placeholder", "ReadVariableOp", "Identity", "IdentityN", "NoOp", "Reshape", "Squeeze", "ExpandDims",
    "StopGradient", "Enter", "Exit", "Merge", "Switch", "NextIteration", "LoopCond", "PreventGradient",
}  # fmt: skip


def optimised(function: Any) -> Any:
    """Returns the GraphDef of a ConcreteFunction after _PASSES, with its loops as frames."""
    graph_def = function.graph.as_graph_def()
    for node in graph_def.node:
        if node.op == "Placeholder" and node.name == "first_step":  # StepRunner puts it there
            node.device = f"/device:{HOST}"
    exported = meta_graph.create_meta_graph_def(graph_def=graph_def, graph=function.graph)
    fetched = meta_graph_pb2.CollectionDef()
    fetched.node_list.value.extend(tensor.name for tensor in [*function.inputs, *function.outputs])
    exported.collection_def["train_op"].CopyFrom(fetched)
    config = config_pb2.ConfigProto()
    config.graph_options.rewrite_options.min_graph_nodes = -1
    config.graph_options.rewrite_options.optimizers.extend(_PASSES)
    return tf_optimizer.OptimizeGraph(config, exported)


@dataclass(frozen=True)
class Kernel:
    """Describes a registered kernel: the values of attributes that it is for, and its arguments in host memory."""

    constraints: dict[str, set[int]]
    host: frozenset[str]
    label: str

    def fits(self, node: "Node") -> bool:
        """Returns whether it is one for the node's types."""
        given = node.proto.attr
        types = all(set(node.types(name)) <= allowed for name, allowed in self.constraints.items())
        return types and self.label == given["_kernel"].s.decode()


@cache
def gpu_kernels(op: str) -> tuple[Kernel, ...]:
    """Returns an operation's kernels for a GPU, those for any device last."""
    found = kernels.get_registered_kernels_for_op(op).kernel
    return tuple(
        Kernel({each.name: set(each.allowed_values.list.type) for each in kernel.constraint},
               frozenset(kernel.host_memory_arg), kernel.label)
        for device in ("GPU", "DEFAULT")
        for kernel in found
        if kernel.device_type == device
    )  # fmt: skip


class Node:
    """Holds a node of a GraphDef: where it runs, and which of its inputs and outputs lie in host memory."""

    def __init__(self, proto: Any) -> None:
        self.proto, self.name, self.op = proto, proto.name, proto.op
        self._definition = op_def_registry.get(self.op)
        kernel = next((kernel for kernel in gpu_kernels(self.op) if kernel.fits(self)), None)
        self.pinned = proto.device.endswith(HOST)
        self.has_kernel = kernel is not None
        self.on_host = self.pinned or not self.has_kernel or self.op in _OF_THE_HOST
        self._in_host_memory = kernel.host if kernel else frozenset()

    def types(self, attribute: str) -> list[int]:
        """Returns the type that an attribute is, or the types that it lists."""
        value = self.proto.attr[attribute] if attribute in self.proto.attr else self._default(attribute)
        return list(value.list.type) or [value.type]

    def _default(self, attribute: str) -> Any:
        return next(each.default_value for each in self._definition.attr if each.name == attribute)

    def _names(self, arguments: Any) -> list[str]:
        """Returns the name of the argument of each tensor."""
        found = []
        for each in arguments:
            count = self.proto.attr[each.number_attr].i if each.number_attr else 1
            found += [each.name] * (len(self.types(each.type_list_attr)) if each.type_list_attr else count)
        return found

    @cached_property
    def inputs(self) -> list[tuple[str, int, bool]]:
        """Returns for each input its producer, the number of the output, and whether it is read on the host."""
        data = [each for each in self.proto.input if not each.startswith("^")]
        names = self._names(self._definition.input_arg)
        parts = [each.partition(":") for each in data]
        return [
            (producer, int(number or 0), self.on_host or name in self._in_host_memory)
            for (producer, _, number), name in zip(parts, names, strict=True)
        ]

    def writes_to_host(self, output: int) -> bool:
        """Returns whether an output is in host memory."""
        if self.op == "Placeholder":  # int32, text and handles of a function's arguments are
            host = {tf.int32.as_datatype_enum, tf.string.as_datatype_enum, tf.resource.as_datatype_enum}
            return self.pinned or self.types("dtype")[0] in host
        return self.on_host or self._names(self._definition.output_arg)[output] in self._in_host_memory


class GpuStep:
    """Describes the loop over steps as a GPU would run it."""

    def __init__(self, graph_def: Any) -> None:
        self._nodes = {proto.name: Node(proto) for proto in graph_def.node}
        self.loop = self._in_loop()

    def waits(self) -> list[str]:
        """Returns the tensors that are copied from a device to the host in each step, as `producer -> consumer`."""
        found = []
        for consumer in self.loop:
            for name, output, on_host in consumer.inputs:
                producer = self._nodes[name]
                if on_host and not producer.writes_to_host(output):
                    found.append(f"{_named(producer)} -> {_named(consumer)}")
        return sorted(found)

    def without_kernel(self) -> list[str]:
        """Returns the operations in the loop that a GPU has no kernel for and nobody has put on the host."""
        homeless = (node for node in self.loop if not (node.has_kernel or node.pinned or node.op in _OF_THE_HOST))
        return sorted(map(_named, homeless))

    def counts(self, replica: int | None) -> dict[str, int]:
        """Returns how many operations, all-reduces and updates of variables a replica makes in a step.

        replica: its index, whose operations are on the logical CPU after it; None: the only one.
        """
        device = f"CPU:{replica + 1}" if replica is not None else ""
        mine = [node for node in self.loop if node.proto.device.endswith(device) and not node.on_host]
        started = [node for node in mine if node.op not in _FREE and not _is_on_host_throughout(node)]
        return {
            "operations": len(started),
            "all-reduces": sum(node.op.startswith("CollectiveReduce") for node in started),
            "updates": sum(node.op.startswith(_UPDATES) for node in started),
        }

    def _in_loop(self) -> list[Node]:
        """Returns the nodes between the entries of frames and their exits."""
        consumers: dict[str, list[Node]] = {}
        for node in self._nodes.values():
            for each in node.proto.input:
                consumers.setdefault(each.lstrip("^").partition(":")[0], []).append(node)
        found: dict[str, Node] = {}
        waiting = [node for node in self._nodes.values() if node.op == "Enter"]
        while waiting:
            node = waiting.pop()
            if node.name not in found and node.op != "Exit":
                found[node.name] = node
                waiting += consumers.get(node.name, [])
        return [node for node in found.values() if node.op != "Enter"]


def _is_on_host_throughout(node: Node) -> bool:
    """Returns whether a kernel of the GPU computes on the host, as those of int32 do."""
    outputs = len(node._names(node._definition.output_arg))
    reads = [on_host for _, _, on_host in node.inputs]
    return bool(outputs) and all(reads) and all(map(node.writes_to_host, range(outputs)))


def _named(node: Node) -> str:
    return f"{node.op} {node.name}"


def row(name: str, counted: dict[str, int]) -> str:
    """Returns the row of the table in docs/scaling.md."""
    return f"| `{name}` | {' | '.join(f'{value:,}' for value in counted.values())} |"
