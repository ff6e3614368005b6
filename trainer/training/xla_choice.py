"""Chooses, before the first step, whether XLA compiles a run's steps.

The choice follows from what is known of the steps, never from a clock. So the same command on the
same machine makes the same choice, however busy it is, and gives the same bits.
docs/decisions/9-xla.md has the measurements behind the rule.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import keras
from keras.layers import (
    Conv1D,
    Conv2D,
    Conv3D,
    DepthwiseConv1D,
    DepthwiseConv2D,
    SeparableConv1D,
    SeparableConv2D,
)

from trainer.base.log import log
from trainer.base.settings.train_config import TrainConfig
from trainer.base.settings.xla_rule import LARGEST_TABLE, barrier, reason_against
from trainer.cluster.strategy import Replicas
from trainer.invariance.internals import all_layers, uses_onednn
from trainer.invariance.step import NotCompilable
from trainer.user_code.interface import ModelInterface
from trainer.user_code.mistakes import message_of

_BY_DEPTH = (DepthwiseConv1D, DepthwiseConv2D, SeparableConv1D, SeparableConv2D)


@dataclass(frozen=True)
class XlaChoice:
    """Holds whether XLA compiles a run's steps, and why."""

    compiled: bool
    why: str

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> "XlaChoice | None":
        """Returns the choice that `asdict` wrote.

        It is None if there is none, or the content is damaged.
        """
        compiled = content.get("compiled")
        why = content.get("why")
        return cls(compiled, why) if isinstance(compiled, bool) and isinstance(why, str) else None

    def sentence(self) -> str:
        """Describes the choice for the log."""
        return f"{'XLA compiles the steps' if self.compiled else 'the steps run plain'}: {self.why}"


def choose(
    config: TrainConfig,
    model: keras.Model,
    replicas: Replicas,
    remaining_steps: int,
    size: Callable[[], int],
    gains: Callable[[], bool],
    earlier: XlaChoice | None = None,
) -> XlaChoice:
    """Returns whether XLA compiles the steps, and why.

    size: returns the number of operations of a compiled step, or raises why it cannot be traced;
        gains: traces a plain step and returns whether XLA would be faster than oneDNN's kernels;
        earlier: the choice of this run before it was resumed, which it keeps.
    """
    if config.jit_compile == "false":
        return XlaChoice(False, "jit_compile=false")

    # The step of several replicas is divided into two programs, between which TensorFlow sums
    # gradients over replicas. Of a GAN, XLA compiles only the critic's gradients.
    divided = replicas.count > 1
    interface = ModelInterface.of(model)
    programs = ""  # how the step is divided, in words
    if divided:
        programs = ", with sums over replicas between two programs"
        if interface.own_step:
            programs = ", with the gradients of its critic alone"
    choice = earlier
    if config.jit_compile == "true":
        choice = XlaChoice(True, f"jit_compile=true{programs}")

    # Some steps XLA cannot compile, whatever was chosen.
    reason = barrier(config)
    if not reason and divided and interface.own_step and not interface.compiles_gradients:
        reason = (
            "its own train_step may update weights before its end, where XLA cannot sum over"
            " replicas"
        )
    if reason:
        # If XLA was chosen before, the change is logged.
        if choice and choice.compiled:
            return not_compiled(reason)
        return XlaChoice(False, reason)

    # With jit_compile=auto the layers and the processor decide.
    if choice is None:
        grouped = []
        convolutions = []
        tables = []
        for layer in all_layers(model):
            if isinstance(layer, (Conv1D, Conv2D, Conv3D)):
                convolutions.append(layer.name)
            if isinstance(layer, _BY_DEPTH) or getattr(layer, "groups", 1) > 1:
                grouped.append(layer.name)
            is_table = isinstance(layer, keras.layers.Embedding)
            if is_table and layer.input_dim * layer.output_dim > LARGEST_TABLE:
                tables.append(layer.name)
        place = "a GPU" if replicas.on_gpus else "this processor, for which TensorFlow lacks oneDNN"
        if replicas.on_gpus or config.deterministic:
            reason = ""
        elif divided:
            reason = "on several CPUs the two programs of a step cost more than they save"
        elif tables:
            reason = f"XLA copies large tables on CPUs in each step, as that of {tables[0]}"
        elif uses_onednn():
            place = "this processor, with small kernels"
            if not gains():
                reason = (
                    "oneDNN's kernels, which TensorFlow has for this processor, are faster for"
                    " convolutions and large products"
                )
        elif grouped:
            reason = (
                f"XLA is slow on CPUs for convolutions by groups or by depth, as in {grouped[0]}"
            )
        # The steps of GANs gain by all that is no convolution.
        elif convolutions and not interface.own_step:
            reason = f"XLA is often slower on CPUs for convolutions, as in {convolutions[0]}"
        try:
            reason = reason or reason_against(config, remaining_steps, size)
        except Exception as error:
            reason = failure_of(error)
        why = reason or f"on {place}, in a run of {remaining_steps:,} steps{programs}"
        choice = XlaChoice(not reason, why)
    if choice.compiled:
        log.info(f"jit_compile: {choice.sentence()}")
    return choice


def not_compiled(why: str) -> XlaChoice:
    """Returns and logs the choice for steps that should be compiled and cannot be."""
    choice = XlaChoice(False, why)
    log.warning(f"jit_compile: {choice.sentence()}")
    return choice


def failure_of(error: Exception) -> str:
    """Returns why XLA could not compile a step, from the error that it raised."""
    if isinstance(error, NotCompilable):
        return message_of(error).rpartition("NotCompilable: ")[2]
    unknown = re.search(r"Detected unsupported operations[^:]* on XLA_\w+: (\w+)", str(error))
    return f"XLA has no kernel for {unknown[1]}" if unknown else f"XLA fails: {message_of(error)}"
