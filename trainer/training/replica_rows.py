"""Divides the batch of a step into the rows of each replica, on its device, and makes of them what
`fit` passes."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from trainer.cluster.strategy import Replicas
from trainer.data.augmentation import Change, StepData
from trainer.data.batches import ReplicaRows
from trainer.invariance.step import StepContext
from trainer.user_code.interface import ModelInterface


@dataclass(frozen=True)
class ReplicaData:
    """Makes the `data` that train_step takes on a replica.

    step_data: makes the data of the parts of a replica's rows, such as x and y;
    augment: changes the images in these;
    undivided: whether a batch has all its rows in axis 0, and no axis of replicas.
    """

    replicas: Replicas
    interface: ModelInterface
    step_data: StepData
    augment: Change | None = None
    undivided: bool = False

    def of_step(self, batch: Any, step: StepContext) -> Any:
        """Returns the data of this replica's step as `fit` passes it, augmented.

        If the model is stacked, the batch has the batches of several critic updates, in front of
        the rows. With virtual replicas each shard (virtual replica) is changed by itself, so that
        its numbers do not depend on how many real replicas there are.
        """
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        stacked = self.interface.stacked
        rows = batch.parts if isinstance(batch, ReplicaRows) else batch

        # The rows of several replicas are together on the host, and are divided there, so that each
        # device gets only the rows of its replica (as uint8, if they are images).
        together = rows is batch and self.replicas.count > 1
        local = replica - self.replicas.first if together else 0
        with tf.device("CPU:0") if together else nullcontext():
            if self.undivided:
                begin = step.first_row
                end = begin + step.rows
                parts = tf.nest.map_structure(
                    lambda part: tf.ensure_shape(part[begin:end], (step.rows, *part.shape[1:])),
                    rows,
                )
            else:
                # (local replicas, batches of a step, rows, …)
                parts = tf.nest.map_structure(
                    lambda part: part[local] if stacked else part[local, 0], rows
                )

        # The rows of stacked data are in axis 1: they are changed together, by draws for each row.
        data = self.step_data(parts)
        if not step.virtual_replicas or stacked:
            return self._augmented(data, step)
        shards = map(step.micro_batch, range(step.micro_batches))
        changed = []
        for shard in shards:
            changed.append(self._augmented(tf.nest.map_structure(shard.part, data), shard))
        return tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), *changed)

    def _augmented(self, data: Any, step: StepContext) -> Any:
        """Returns `data` with its images changed at random.

        Each global batch of a step has separate draws.
        """
        if not self.augment:
            return data
        images = data[0] if isinstance(data, tuple) else data
        if self.interface.stacked:
            batches = range(self.interface.batches_per_step)
            images = tf.stack([self.augment(images[i], step.within(f"batch {i}")) for i in batches])
        else:
            images = self.augment(images, step)
        return (images, *data[1:]) if isinstance(data, tuple) else images
