"""Lists the parts of the measurement in the order of their value, each with the command that runs it and its limit."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

# A case of `speeds` is one network: flags of trainer.task on a GPU, and those that make it small for a rehearsal.
_OWN = "benchmarks.gpu.networks"
CASES: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "cnn": (["--recipe=cnn_mnist", "--global_batch_size=512"], ["--width=4", "--global_batch_size=8"]),
    "resnet50": (
        [f"--model={_OWN}:resnet50", f"--data={_OWN}:photos", "--global_batch_size=64"],
        ["--size=32", "--global_batch_size=4"],
    ),
    "resnet50-bf16": (
        [f"--model={_OWN}:resnet50", f"--data={_OWN}:photos", "--global_batch_size=128", "--precision=mixed_bfloat16"],
        ["--size=32", "--global_batch_size=4"],
    ),
    "wgan_gp-32": (["--recipe=wgan_gp_mnist", "--global_batch_size=64"], ["--width=4", "--global_batch_size=8"]),
    "unet": (
        [f"--model={_OWN}:unet", f"--data={_OWN}:masks", "--global_batch_size=32"],
        ["--size=16", "--filters=4", "--global_batch_size=4"],
    ),
    "dcgan": (["--recipe=dcgan_mnist", "--global_batch_size=64"], ["--width=4", "--global_batch_size=8"]),
    "transformer": (
        [f"--model={_OWN}:transformer", f"--data={_OWN}:sentences", "--global_batch_size=64"],
        ["--length=16", "--width=16", "--blocks=1", "--heads=2", "--global_batch_size=8"],
    ),
    "wgan_gp-64": (
        ["--recipe=wgan_gp_photos", "--augment=", "--diff_augment=", "--global_batch_size=64"],
        ["--width=4", "--global_batch_size=8"],
    ),
    "mlp": (["--recipe=mlp_mnist", "--global_batch_size=512"], ["--width=16", "--global_batch_size=8"]),
}
MEMORY_CASES = ("resnet50", "unet", "wgan_gp-64", "transformer")


@dataclass(frozen=True)
class Part:
    """Describes one part: what it answers, the module that measures it, and the most seconds that it may take."""

    name: str
    question: str
    arguments: Sequence[str]  # of `python -m benchmarks.gpu.MODULE`
    seconds: float
    gpus: int = 1  # that it needs at least
    measures: bool = False  # times, so that it waits for its turn where parts run together

    @property
    def command(self) -> list[str]:
        """Returns the command that runs the part in a process of its own."""
        module, *flags = self.arguments
        return [sys.executable, "-m", f"benchmarks.gpu.{module}", *flags]


def _speeds(case: str) -> Part:
    question = f"{case}: steps a second of ours (plain, XLA, auto), Keras fit and PyTorch; where the time goes"
    arguments = ["speeds", f"--case={case}", "--repeats=3", "--seconds=0.5"]
    return Part(f"speeds_{case}", question, arguments, 150, measures=True)


PARTS: tuple[Part, ...] = (
    Part("acceptance", "does each precision, XLA and each number of GPUs agree with float64 on the CPU?",
         ["acceptance"], 240),
    _speeds("resnet50"), _speeds("wgan_gp-32"), _speeds("cnn"),
    Part("batch_norm", "what does batch norm over replicas cost beside the fused kernel?", ["batch_norm"], 90,
         measures=True),
    Part("memory", "the peak beside what the plan predicts; CUDA's context and workspaces; the largest batch",
         ["memory"], 240),
    Part("constants", "what does it take to start an operation and an all-reduce?", ["constants"], 60, measures=True),
    _speeds("unet"), _speeds("dcgan"), _speeds("transformer"),
    Part("exactness", "are runs equal with --deterministic, and how far is TF32?", ["exactness"], 120),
    Part("input_path", "images a second of the input alone, up to the device", ["input_path"], 90, measures=True),
    Part("main_job", "the main job, with its picture", ["main_job"], 180),
    _speeds("wgan_gp-64"), _speeds("mlp"), _speeds("resnet50-bf16"),
    Part("halves", "are two replicas on GPU kernels equal to one, and virtual replicas in all bits?", ["halves"], 180),
    Part("several", "1 against 2, 4 and 8 GPUs: steps a second, equal numbers", ["several"], 300, gpus=2),
)  # fmt: skip
# For rehearsals: what a part that hangs, is killed, or runs out of memory leaves.
FAULTS: tuple[Part, ...] = (
    Part("fault_hangs", "a part that never ends", ["faults", "--kind=hangs"], 3),
    Part("fault_killed", "a part that the system kills", ["faults", "--kind=killed"], 30),
    Part("fault_memory", "a part that runs out of memory", ["faults", "--kind=memory"], 60),
)
