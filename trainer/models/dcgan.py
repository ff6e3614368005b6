"""Builds DCGAN: Radford et al. 2016, https://arxiv.org/abs/1511.06434.

Both networks have batch norm, which spans all replicas. Weights come from N(0, 0.02); the recipes use Adam(2e-4, 0.5).
A step is one discriminator and one generator update, each with new noise (Goodfellow et al. 2014, Algorithm 1).
"""

from functools import partial
from typing import Any

import keras
import tensorflow as tf

from trainer.invariance.batch_norm import separate_groups
from trainer.invariance.internals import compiled_by_xla
from trainer.invariance.step import current_step
from trainer.models.gan import GAN, images_of, twice
from trainer.models.image_layers import prefers_many_rows


class DCGAN(GAN):
    """Trains the critic to tell real images from generated ones, by cross-entropy, and the generator to mislead it."""

    betas = (0.5, 0.999)
    critic_batch_norm = True
    initializer = staticmethod(partial(keras.initializers.RandomNormal, stddev=0.02))

    def train_step(self, data: Any) -> dict[str, Any]:
        """Returns the losses. data: images (1, rows, height, width, channels) in [0, 255], perhaps labels (1, rows)."""
        step = current_step()
        noise = step.normal((2, self.latent_dim), stream="noise")
        fakes, generated = self.images_for_updates(step, noise, self.labels_of(data))
        critic_loss = self.update_critic(step, images_of(data)[0], fakes)
        generator_loss = self.update_generator(step, generated)
        self.average_generator(step)
        return {"discriminator_loss": critic_loss, "generator_loss": generator_loss}

    def critic_gradients(self, reals: Any, fakes: Any, global_batch_size: int, labels: Any = None) -> Any:
        """Returns the loss, and a gradient of the scaled loss for each critic variable, over this replica's rows.

        reals, fakes: (rows, height, width, channels) in [-1, 1]. Batch norm treats them separately. labels: (rows,),
        those of both, if the GAN is conditional.
        """
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(self.critic_variables)
            if compiled_by_xla() and not prefers_many_rows():  # on a CPU XLA would copy the groups of batch norm
                of_reals, of_fakes = self.scores(reals, labels), self.scores(fakes, labels)
            else:
                with separate_groups(2):
                    scores = self.scores(tf.concat([reals, fakes], axis=0), twice(labels))
                of_reals, of_fakes = scores[: reals.shape[0]], scores[reals.shape[0] :]
            loss = (_cross_entropy(of_reals, real=True) + _cross_entropy(of_fakes, real=False)) / global_batch_size
            scaled = self.critic_optimizer.scale_loss(loss)
        return loss, tape.gradient(scaled, self.critic_variables)

    def generator_loss(self, scores: Any, real_scores: Any) -> Any:
        """Returns the cross-entropy of the scores with "real"."""
        return _cross_entropy(scores, real=True)


def _cross_entropy(scores: Any, *, real: bool) -> Any:
    """Returns the cross-entropy, summed over rows, with a target of 1 for real images and 0 for generated ones."""
    target = tf.ones_like(scores) if real else tf.zeros_like(scores)
    return tf.reduce_sum(tf.nn.sigmoid_cross_entropy_with_logits(target, scores))
