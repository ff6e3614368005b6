"""Builds WGAN-GP (Wasserstein, gradient penalty): Gulrajani et al. 2017, https://arxiv.org/abs/1704.00028, Algorithm 1.

The critic has no batch norm, as the penalty is on each example's own gradient. The generator's batch norm spans all
replicas. Losses and penalty are divided by the GLOBAL batch, so the number of replicas changes nothing.
"""

from typing import Any

import tensorflow as tf

from trainer.base.settings.model_settings import WGANGPConfig
from trainer.invariance.step import current_step
from trainer.models.gan import GAN, images_of, scores_and_slopes, twice


def gradient_norms(critic: Any, images: Any, labels: Any = None) -> Any:
    """Returns the L2 norm of the critic's gradient at each image, (rows,); where it is 0 its gradient is 0, not NaN."""

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

    def train_step(self, data: Any) -> dict[str, Any]:
        """Returns the losses.

        data: images (critic_steps, rows, height, width, channels) in [0, 255], perhaps labels (critic_steps, rows).
        """
        step = current_step()
        noise = step.normal((self.batches_per_step + 1, self.latent_dim), stream="noise")
        mix = step.uniform((self.batches_per_step, 1, 1, 1), stream="interpolation")
        *fakes, generated = self.images_for_updates(step, noise, self.labels_of(data))
        batches = zip(tf.unstack(images_of(data)), fakes, tf.unstack(mix, axis=1), strict=True)
        updates = [self.update_critic(step, *batch) for batch in batches]
        logs = {name: tf.add_n([update[name] for update in updates]) / len(updates) for name in updates[0]}
        logs["generator_loss"] = self.update_generator(step, generated)
        self.average_generator(step)
        return logs

    def critic_gradients(self, reals: Any, fakes: Any, mix: Any, global_batch_size: int, labels: Any = None) -> Any:
        """Returns losses by name, and a gradient of the scaled loss for each critic variable, over this replica's rows.

        reals, fakes: (rows, height, width, channels) in [-1, 1]; mix: (rows, 1, 1, 1) in [0, 1), the share of the real
        one in each image at which the critic's gradient is penalised; labels: (rows,), those of both, if the GAN is
        conditional. With --diff_augment, changed images are mixed, as the critic sees no others.
        """
        rows = reals.shape[0]
        mixed = fakes + mix * (reals - fakes)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(self.critic_variables)
            scores = self.scores(tf.concat([fakes, reals], axis=0), twice(labels))
            difference = tf.reduce_sum(scores * tf.constant([[1.0]] * rows + [[-1.0]] * rows, scores.dtype))
            excess = tf.reduce_sum(tf.square(gradient_norms(self.critic, mixed, labels) - 1.0))
            wasserstein = difference / global_batch_size
            penalty = excess / global_batch_size
            loss = wasserstein + self.settings.gradient_penalty_weight * penalty
            scaled = self.critic_optimizer.scale_loss(loss)
        losses = {"critic_loss": loss, "wasserstein_distance": -wasserstein, "gradient_penalty": penalty}
        return losses, tape.gradient(scaled, self.critic_variables)

    def generator_loss(self, scores: Any, real_scores: Any) -> Any:
        """Returns minus the sum of the scores."""
        return -tf.reduce_sum(scores)
