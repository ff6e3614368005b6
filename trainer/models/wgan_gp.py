"""Builds WGAN-GP (Wasserstein, gradient penalty): Gulrajani et al. 2017,
https://arxiv.org/abs/1704.00028, Algorithm 1.

The critic has no batch norm, as the penalty is on each example's own gradient. The generator's
batch norm spans all replicas. Losses and penalty are divided by the GLOBAL batch, so the number of
replicas changes nothing.
"""

from typing import Any

import tensorflow as tf

from trainer.base.settings.model_settings import WGANGPConfig
from trainer.invariance.step import StepContext
from trainer.models.gan import GAN, scores_and_slopes, twice


def gradient_norms(critic: Any, images: Any, labels: Any = None) -> Any:
    """Returns the L2 norm of the critic's gradient at each image, (rows,); at 0 without NaN."""

    def root(squares: Any) -> tuple[Any, Any]:
        norms = tf.sqrt(squares)
        return norms, lambda upstream: tf.math.divide_no_nan(0.5 * upstream, norms)

    _, squares = scores_and_slopes(critic, images, labels)
    return tf.custom_gradient(root)(squares)


class WGANGP(GAN):
    """Makes `critic_steps` critic updates and then one generator update per step."""

    settings: WGANGPConfig
    compiles_gradients = True

    betas = (0.0, 0.9)

    def drawn_for_updates(self, step: StepContext) -> list[list[Any]]:
        """Returns the shares of the real images at which the critic's gradient is penalised."""
        mix = step.uniform((self.batches_per_step, 1, 1, 1), stream="interpolation")
        return [tf.unstack(mix, axis=1)]

    def critic_losses(
        self, reals: Any, fakes: Any, mix: Any, global_batch_size: int, labels: Any = None
    ) -> dict[str, Any]:
        """Returns the loss, the distance and the penalty over this replica's rows.

        reals, fakes: (rows, height, width, channels) in [-1, 1]; mix: (rows, 1, 1, 1) in [0, 1),
        the share of the real one in each image at which the critic's gradient is penalised; labels:
        (rows,), those of both, if the GAN is conditional. With --diff_augment, changed images are
        mixed, as the critic sees no others.
        """
        rows = reals.shape[0]
        scores = self.scores(tf.concat([fakes, reals], axis=0), twice(labels))
        signs = tf.constant([[1.0]] * rows + [[-1.0]] * rows, scores.dtype)
        difference = tf.reduce_sum(scores * signs)  # fakes minus reals
        norms = gradient_norms(self.critic, fakes + mix * (reals - fakes), labels)
        minus_distance = difference / global_batch_size
        penalty = tf.reduce_sum(tf.square(norms - 1.0)) / global_batch_size
        return {
            "critic_loss": minus_distance + self.settings.gradient_penalty_weight * penalty,
            "wasserstein_distance": -minus_distance,
            "gradient_penalty": penalty,
        }

    def generator_loss(self, scores: Any, real_scores: Any) -> Any:
        """Returns minus the sum of the scores."""
        return -tf.reduce_sum(scores)
