"""Builds R3GAN's loss on the networks of this package: Huang et al. 2024, https://arxiv.org/abs/2501.05441, section 2.

The critic learns that each real image is more realistic than the generated one it is paired with, and the generator the
contrary (Jolicoeur-Martineau 2018, arxiv.org/abs/1807.00734). Zero-centred penalties on the critic's gradient at
real images (R1) and at generated ones (R2) make that converge. A pair is one row of the global batch, so the number of
replicas changes nothing. The critic has no batch norm, as the penalties are on each image's own gradient. A step is one
critic and one generator update by the same real images, each with new noise.
"""

from typing import Any

import tensorflow as tf

from trainer.base.settings.model_settings import R3GANConfig
from trainer.data.sample_grids import from_uint8
from trainer.invariance.step import current_step
from trainer.models.gan import GAN, images_of, scores_and_slopes, twice


class R3GAN(GAN):
    """Trains by the logistic loss of pairs, and gamma / 2 times R1 and R2; gamma is `gradient_penalty_weight`."""

    settings: R3GANConfig
    compiles_gradients = True

    betas = (0.0, 0.99)
    score_bias = False  # differences of scores cancel a bias: its gradient would be rounding errors alone

    def train_step(self, data: Any) -> dict[str, Any]:
        """Returns the losses. data: images (1, rows, height, width, channels) in [0, 255], perhaps labels (1, rows)."""
        step, reals = current_step(), images_of(data)[0]
        noise = step.normal((2, self.latent_dim), stream="noise")
        fakes, generated = self.images_for_updates(step, noise, self.labels_of(data))
        losses = self.update_critic(step, reals, fakes)
        generator_loss = self.update_generator(step, generated._replace(reals=from_uint8(reals)))
        self.average_generator(step)
        return {**losses, "generator_loss": generator_loss}

    def critic_gradients(self, reals: Any, fakes: Any, global_batch_size: int, labels: Any = None) -> Any:
        """Returns losses by name, and a gradient of the scaled loss for each critic variable, over this replica's rows.

        reals, fakes: (rows, height, width, channels) in [-1, 1], as the critic sees them; its gradient is penalised at
        these very images; labels: (rows,), those of both, if the GAN is conditional.
        """
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(self.critic_variables)
            scores, squares = scores_and_slopes(self.critic, tf.concat([reals, fakes], axis=0), twice(labels))
            of_reals, of_fakes = tf.split(scores, 2)
            penalty = tf.reduce_sum(squares) / global_batch_size
            loss = (
                _pairs(of_reals, of_fakes) / global_batch_size + 0.5 * self.settings.gradient_penalty_weight * penalty
            )
            scaled = self.critic_optimizer.scale_loss(loss)
        return {"critic_loss": loss, "gradient_penalty": penalty}, tape.gradient(scaled, self.critic_variables)

    def generator_loss(self, scores: Any, real_scores: Any) -> Any:
        """Returns the loss of pairs in which the generated image should be the more realistic."""
        return _pairs(scores, real_scores)


def _pairs(better: Any, worse: Any) -> Any:
    """Returns the sum of -log sigmoid(better - worse) over pairs of scores, (rows, 1)."""
    return tf.reduce_sum(tf.nn.softplus(worse - better))
