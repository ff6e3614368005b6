"""Divides the examples of a dataset into steps: how many an epoch has, and a run. Imports no TensorFlow."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Describes how the examples of a dataset are divided into steps."""

    examples: int
    global_batch_size: int
    batches_per_step: int  # global batches that one step reads: critic_steps for a GAN with a critic, else 1
    seed: int

    @property
    def examples_per_step(self) -> int:
        """Returns the number of examples that all replicas read in one step."""
        return self.global_batch_size * self.batches_per_step

    @property
    def steps_per_epoch(self) -> int:
        """Returns the number of full steps in one pass over the examples; at least 1."""
        return max(1, self.examples // self.examples_per_step)

    @property
    def left_out(self) -> int:
        """Returns how many examples of a pass fill no whole step: `fit` trains on them, this package does not."""
        return max(0, self.examples - self.steps_per_epoch * self.examples_per_step)

    def total_steps(self, steps: int | None, epochs: int | None) -> int:
        """Returns the length of a run in steps: `steps`, or those of `epochs` epochs, by default one."""
        return steps or (epochs or 1) * self.steps_per_epoch
