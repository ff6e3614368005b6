"""Builds DCGAN: Radford et al. 2016, https://arxiv.org/abs/1511.06434.

Both networks have batch norm, which spans all replicas. Weights come from N(0, 0.02); the recipes
use Adam(2e-4, 0.5). A step is one discriminator and one generator update, each with new noise
(Goodfellow et al. 2014, Algorithm 1).
"""

from functools import partial
from typing import Any

import keras
import tensorflow as tf

from trainer.invariance.batch_norm import separate_groups
from trainer.invariance.internals import compiled_by_xla
from trainer.models.gan import GAN, twice
from trainer.models.image_layers import prefers_many_rows


class DCGAN(GAN):
    """Trains critic and generator by cross-entropy."""

    betas = (0.5, 0.999)
    critic_batch_norm = True
    initializer = staticmethod(partial(keras.initializers.RandomNormal, stddev=0.02))

    def critic_losses(
        self, reals: Any, fakes: Any, global_batch_size: int, labels: Any = None
    ) -> dict[str, Any]:
        """Returns the loss over this replica's rows.

        reals, fakes: (rows, height, width, channels) in [-1, 1]. Batch norm treats them separately.
        labels: (rows,), those of both, if the GAN is conditional.
        """
        # on a CPU XLA would copy the groups of batch norm
        if compiled_by_xla() and not prefers_many_rows():
            of_reals = self.scores(reals, labels)
            of_fakes = self.scores(fakes, labels)
        else:
            with separate_groups(2):
                scores = self.scores(tf.concat([reals, fakes], axis=0), twice(labels))
            of_reals, of_fakes = tf.split(scores, 2)
        total = _cross_entropy(of_reals, real=True) + _cross_entropy(of_fakes, real=False)
        return {"discriminator_loss": total / global_batch_size}

    def generator_loss(self, scores: Any, real_scores: Any) -> Any:
        """Returns the cross-entropy of the scores with "real"."""
        return _cross_entropy(scores, real=True)


def _cross_entropy(scores: Any, *, real: bool) -> Any:
    """Returns the cross-entropy, summed over rows; real images have the target 1, others 0."""
    target = tf.ones_like(scores) if real else tf.zeros_like(scores)
    return tf.reduce_sum(tf.nn.sigmoid_cross_entropy_with_logits(target, scores))
