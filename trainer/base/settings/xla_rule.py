"""Says by the settings of a run and the number of its devices why XLA does not compile its steps. No TensorFlow.

trainer/training/xla_choice.py adds what the model and the processor tell; a plan asks for GPUs before there is a model.
"""

from collections.abc import Callable

from trainer.base.settings.train_config import TrainConfig

# A shorter run would lose more by compiling, some 10 ms an operation, than its steps gain.
FEWEST_STEPS, FEWEST_OPERATIONS = 500, 1_000_000
# Of a step of which several may be one program of XLA: to start a longer one costs less than a tenth of it.
MOST_FLOPS = {"CPU": 5e7, "GPU": 1e12}
_NODES = 3  # of a traced step, for each operation that starts a kernel: 2.8 to 4.5 in our recipes


def barrier(config: TrainConfig, replicas: int) -> str:
    """Returns why no step on so many replicas can be compiled, "" if one may be."""
    if config.remat:
        return f"XLA may keep what remat={config.remat} computes again"
    if config.virtual_replicas:
        return f"XLA would add the gradients of virtual_replicas={config.virtual_replicas} in another order"
    if config.micro_batches > 1:
        return f"XLA would keep all of micro_batches={config.micro_batches} in memory at once"
    if config.shard_optimizer and replicas > 1:
        return "XLA has no variables that live within a step, which shard_optimizer needs"
    return ""


def reason_against(config: TrainConfig, steps: int, size: Callable[[], int]) -> str:
    """Returns why jit_compile=auto runs plain steps where no barrier is, "" if it compiles them.

    size: returns the number of operations of a traced step; it is called only if all else speaks for compiling.
    """
    if config.deterministic:
        return "deterministic=true"
    if steps < FEWEST_STEPS:
        return f"{steps} steps are too few"
    operations = size()
    return f"{steps} steps of {operations:,} operations are too few" if steps * operations < FEWEST_OPERATIONS else ""


def compiles(config: TrainConfig, replicas: int, steps: int, kernels: int) -> bool:
    """Returns whether a run on GPUs compiles its steps, as far as its settings and counts tell.

    kernels: the operations of a step that start one.
    """
    if config.jit_compile == "false" or barrier(config, replicas):
        return False
    return config.jit_compile == "true" or not reason_against(config, steps, lambda: _NODES * kernels)
