"""Builds R3GAN's loss on the networks of this package: Huang et al. 2024,
https://arxiv.org/abs/2501.05441, section 2.

The critic learns that each real image is more realistic than the generated one it is paired with,
and the generator the contrary (Jolicoeur-Martineau 2018, arxiv.org/abs/1807.00734). Zero-centred
penalties on the critic's gradient at real images (R1) and at generated ones (R2) make that
converge. A pair is one row of the global batch, so the number of replicas changes nothing. The
critic has no batch norm, as the penalties are on each image's own gradient. A step is one critic
and one generator update by the same real images, each with new noise.
"""

from typing import Any

import tensorflow as tf

from trainer.base.settings.model_settings import R3GANConfig
from trainer.models.gan import GAN, scores_and_slopes, twice


class R3GAN(GAN):
    """Trains by the logistic loss of pairs, and gamma / 2 x (R1 + R2).

    gamma is `gradient_penalty_weight`.
    """

    settings: R3GANConfig
    compiles_gradients = True
    pairs_images = True

    betas = (0.0, 0.99)
    # differences of scores cancel a bias: its gradient would be rounding errors alone
    score_bias = False

    def critic_losses(
        self, reals: Any, fakes: Any, global_batch_size: int, labels: Any = None
    ) -> dict[str, Any]:
        """Returns the loss and the penalty over this replica's rows.

        reals, fakes: (rows, height, width, channels) in [-1, 1], as the critic sees them; its
        gradient is penalised at these very images; labels: (rows,), those of both, if the GAN is
        conditional.
        """
        scores, squares = scores_and_slopes(
            self.critic, tf.concat([reals, fakes], axis=0), twice(labels)
        )
        of_reals, of_fakes = tf.split(scores, 2)
        penalty = tf.reduce_sum(squares) / global_batch_size
        loss = (
            _pairs(of_reals, of_fakes) / global_batch_size
            + 0.5 * self.settings.gradient_penalty_weight * penalty
        )
        return {"critic_loss": loss, "gradient_penalty": penalty}

    def generator_loss(self, scores: Any, real_scores: Any) -> Any:
        """Returns the loss of pairs in which the generated image should be the more realistic."""
        return _pairs(scores, real_scores)


def _pairs(better: Any, worse: Any) -> Any:
    """Returns the sum of -log sigmoid(better - worse) over pairs of scores, (rows, 1)."""
    return tf.reduce_sum(tf.nn.softplus(worse - better))
