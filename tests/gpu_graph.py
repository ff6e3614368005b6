"""Finds, on a CPU, where a GPU would make the host wait in the loop over steps, from TensorFlow's
registry of kernels.

The PyPI wheel registers its GPU kernels on every machine, with those of their inputs and outputs
that lie in the host's memory. A tensor that a kernel writes to the device's memory and another one
reads on the host is copied, and the host waits for all that the device was asked to do before.

Logical CPUs from number 1 on stand for GPUs, and CPU:0 is the host. What runs on a real GPU differs
in this: the layout of convolutions and fused kernels are the business of later passes, which add no
wait, and TensorFlow places what no strategy has placed by rules that are only approximated here: on
the GPU if it has the kernel.
"""

from functools import cache, cached_property
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import config_pb2, meta_graph_pb2
from tensorflow.python.framework import kernels, meta_graph, op_def_registry
from tensorflow.python.grappler import tf_optimizer

HOST = "CPU:0"
# What grappler does for every device: calls become part of the graph, loops become their frames,
# constants are folded.
_PASSES = ("function", "constfold", "pruning", "dependency", "common_subgraph_elimination")
# They stay with the resource that they read from, which is on the host.
_OF_THE_HOST = {"IteratorGetNext", "Placeholder", "_Arg", "NoOp"}
_UPDATES = ("Assign", "ResourceApply", "ResourceScatter")
# No kernel is started for them.
_FREE = {
    "Const",
    "Placeholder",
    "ReadVariableOp",
    "Identity",
    "IdentityN",
    "NoOp",
    "Reshape",
    "Squeeze",
    "ExpandDims",
    "StopGradient",
    "Enter",
    "Exit",
    "Merge",
    "Switch",
    "NextIteration",
    "LoopCond",
    "PreventGradient",
}


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


@cache
def gpu_kernels(op: str) -> tuple[Any, ...]:
    """Returns an operation's kernels for a GPU, those for any device last."""
    registered = kernels.get_registered_kernels_for_op(op).kernel
    return tuple(
        kernel
        for device in ("GPU", "DEFAULT")
        for kernel in registered
        if kernel.device_type == device
    )


class Node:
    """Holds a node of a GraphDef: where it runs, and which of its inputs and outputs lie in host
    memory."""

    def __init__(self, proto: Any) -> None:
        self.proto = proto
        self.name = proto.name
        self.op = proto.op
        self.label = f"{self.op} {self.name}"
        self._definition = op_def_registry.get(self.op)
        kernel = next((kernel for kernel in gpu_kernels(self.op) if self._fits(kernel)), None)
        self.pinned = proto.device.endswith(HOST)
        self.has_kernel = kernel is not None
        self.on_host = self.pinned or not self.has_kernel or self.op in _OF_THE_HOST
        self._in_host_memory = kernel.host_memory_arg if kernel else ()

    def _fits(self, kernel: Any) -> bool:
        """Returns whether a kernel is for the node's types."""
        types = all(
            set(self.types(each.name)) <= set(each.allowed_values.list.type)
            for each in kernel.constraint
        )
        return types and kernel.label == self.proto.attr["_kernel"].s.decode()

    def types(self, attribute: str) -> list[int]:
        """Returns the type that an attribute is, or the types that it lists."""
        default = next(
            (each.default_value for each in self._definition.attr if each.name == attribute), None
        )
        value = self.proto.attr.get(attribute, default)
        return list(value.list.type) or [value.type]

    def _names(self, arguments: Any) -> list[str]:
        """Returns the name of the argument of each tensor."""
        names = []
        for each in arguments:
            count = self.proto.attr[each.number_attr].i if each.number_attr else 1
            names += [each.name] * (
                len(self.types(each.type_list_attr)) if each.type_list_attr else count
            )
        return names

    @cached_property
    def inputs(self) -> list[tuple[str, int, bool]]:
        """Returns for each input its producer, the number of the output, and whether it is read on
        the host."""
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
            host = {
                tf.int32.as_datatype_enum,
                tf.string.as_datatype_enum,
                tf.resource.as_datatype_enum,
            }
            return self.pinned or self.types("dtype")[0] in host
        return (
            self.on_host or self._names(self._definition.output_arg)[output] in self._in_host_memory
        )

    def computes_on_host(self) -> bool:
        """Returns whether its kernel of the GPU computes on the host, as those of int32 do."""
        outputs = range(len(self._names(self._definition.output_arg)))
        reads = [on_host for _, _, on_host in self.inputs]
        return bool(outputs) and all(reads) and all(map(self.writes_to_host, outputs))


class GpuStep:
    """Describes the loop over steps as a GPU would run it."""

    def __init__(self, graph_def: Any) -> None:
        self._nodes = {proto.name: Node(proto) for proto in graph_def.node}
        # The loop is what lies between the entries of frames and their exits.
        consumers = {}
        for node in self._nodes.values():
            for each in node.proto.input:
                consumers.setdefault(each.lstrip("^").partition(":")[0], []).append(node)
        inside = {}
        waiting = [node for node in self._nodes.values() if node.op == "Enter"]
        while waiting:
            node = waiting.pop()
            if node.name not in inside and node.op != "Exit":
                inside[node.name] = node
                waiting += consumers.get(node.name, [])
        self.loop = [node for node in inside.values() if node.op != "Enter"]

    def waits(self) -> list[str]:
        """Returns the tensors that are copied from a device to the host in each step, as `producer
        -> consumer`."""
        return sorted(
            f"{self._nodes[name].label} -> {consumer.label}"
            for consumer in self.loop
            for name, output, read_on_host in consumer.inputs
            if read_on_host and not self._nodes[name].writes_to_host(output)
        )

    def without_kernel(self) -> list[str]:
        """Returns the operations in the loop that a GPU has no kernel for and nobody has put on the
        host."""
        return sorted(
            node.label
            for node in self.loop
            if not (node.has_kernel or node.pinned or node.op in _OF_THE_HOST)
        )

    def counts(self, replica: int | None) -> dict[str, int]:
        """Returns how many operations, all-reduces and updates of variables a replica makes in a
        step.

        replica: its index, whose operations are on the logical CPU after it; None: the only one.
        """
        device = f"CPU:{replica + 1}" if replica is not None else ""
        mine = [
            node for node in self.loop if node.proto.device.endswith(device) and not node.on_host
        ]
        started = [node for node in mine if node.op not in _FREE and not node.computes_on_host()]
        return {
            "operations": len(started),
            "all-reduces": sum(node.op.startswith("CollectiveReduce") for node in started),
            "updates": sum(node.op.startswith(_UPDATES) for node in started),
        }
