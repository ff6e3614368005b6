"""Decides from the settings of a run and its number of devices whether XLA compiles its steps.

No TensorFlow.

trainer/training/xla_choice.py adds what model and processor show; a plan needs the answer before
there is a model.
"""

from collections.abc import Callable

from trainer.base.settings.train_config import TrainConfig

# A shorter run loses more by compiling, some 10 ms an operation, than its steps gain.
FEWEST_STEPS = 500
FEWEST_OPERATIONS = 1_000_000
# A GPU's steps with more FLOPs are not compiled into one program: starting such a step costs less
# than a tenth of its time.
MOST_FLOPS = 1e12
# What XLA saves on a CPU, in FLOPs that take as long: the start of a kernel, and a byte that one
# kernel writes and another one reads.
FLOPS_OF_START = 3e5
FLOPS_OF_BYTE = 3
# A larger table of embeddings is copied by a program that updates some of its rows.
LARGEST_TABLE = 2**18  # numbers
_NODES = 3  # nodes of a traced step per operation that starts a kernel: 2.8 to 4.5 in our recipes


def barrier(config: TrainConfig) -> str:
    """Returns why XLA must not compile a step; "" if it may."""
    if config.virtual_replicas:
        return (
            f"XLA would add the gradients of virtual_replicas={config.virtual_replicas} in another"
            " order"
        )
    if config.micro_batches > 1:
        return f"XLA would keep all of micro_batches={config.micro_batches} in memory at once"
    return ""


def reason_against(config: TrainConfig, steps: int, size: Callable[[], int]) -> str:
    """Returns why jit_compile=auto does not compile steps although `barrier` allows it; "" if it
    compiles them.

    size: returns the number of operations of a traced step; it is called last, because tracing
        takes time.
    """
    if config.deterministic:  # on GPUs, XLA chooses kernels by timing them
        return "deterministic=true"
    if steps < FEWEST_STEPS:
        return f"{steps} steps are too few"
    operations = size()
    if steps * operations >= FEWEST_OPERATIONS:
        return ""
    return f"{steps} steps of {operations:,} operations are too few"


def compiles(config: TrainConfig, steps: int, kernels: int) -> bool:
    """Returns whether a run on GPUs compiles its steps, judged by its settings and counts alone.

    kernels: the number of operations of a step that start a kernel.
    """
    if config.jit_compile == "false" or barrier(config):
        return False
    return config.jit_compile == "true" or not reason_against(
        config, steps, lambda: _NODES * kernels
    )
