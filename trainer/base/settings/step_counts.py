"""Divides the examples of a dataset into steps: how many an epoch has, and a run.

Imports no TensorFlow.
"""

import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Describes how the examples of a dataset are divided into steps.

    A pass over the examples is an epoch, unless `epoch_steps` says how many steps an epoch has.
    """

    examples: int
    global_batch_size: int
    # global batches that one step reads: critic_steps for a GAN with a critic, else 1
    batches_per_step: int
    seed: int
    # rows of the smaller batch that ends a pass, if it is trained on; 0: each pass ends before it
    last: int = 0
    epoch_steps: int = 0

    @property
    def examples_per_step(self) -> int:
        """Returns the number of examples that all replicas read in one step."""
        return self.global_batch_size * self.batches_per_step

    @property
    def whole_steps(self) -> int:
        """Returns the number of full steps in one pass over the examples; at least 1."""
        return max(1, self.examples // self.examples_per_step)

    @property
    def steps_per_pass(self) -> int:
        """Returns the number of steps in one pass over the examples, with that of a smaller last
        batch."""
        return self.whole_steps + bool(self.last)

    @property
    def steps_per_epoch(self) -> int:
        """Returns the number of steps in an epoch."""
        return self.epoch_steps or self.steps_per_pass

    @property
    def left_out(self) -> int:
        """Returns how many examples of a pass no step trains on."""
        return max(0, self.examples - self.whole_steps * self.examples_per_step - self.last)

    def whole_before(self, step: int) -> int:
        """Returns how many of the first `step` steps are full ones."""
        passes, of_pass = divmod(step, self.steps_per_pass)
        return passes * self.whole_steps + min(of_pass, self.whole_steps)

    def whole_from(self, step: int) -> int:
        """Returns how many full steps follow from `step` on before a smaller one; 0 if it is that
        of a last batch."""
        return self.steps_per_pass - 1 - step % self.steps_per_pass if self.last else sys.maxsize

    def total_steps(self, steps: int | None, epochs: int | None) -> int:
        """Returns the length of a run in steps: `steps`, or those of `epochs` epochs, by default
        one."""
        return steps or (epochs or 1) * self.steps_per_epoch
