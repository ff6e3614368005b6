"""Provides what GANs share: generator and critic networks, their updates, the averaged generator,
samples, templates.

`--conditional` gives the networks the class of each image. The generator gets it by concatenation
(Mirza and Osindero 2014, https://arxiv.org/abs/1411.1784): beside the noise, a vector that is zero
but for the class. It is as long as the noise is on average, so that both start with equal
influence. The critic gets it by projection (Miyato and Koyama 2018,
https://arxiv.org/abs/1802.05637): its score is that of the image, plus the product of the image's
features with a learnt vector of the class. A critic might ignore a class that is concatenated with
the image; this one has to tell whether the image is of that class, and its convolutions run on
images alone.

In an update, a generated image gets the label of the real image in the same row. So no labels are
drawn, real and generated images have the same classes, and an image between the two, as WGAN-GP
has, is of one class.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from trainer.base.errors import UserError
from trainer.base.settings.model_settings import GANConfig, WGANGPConfig
from trainer.base.settings.train_config import TrainConfig
from trainer.data.dataset import Dataset
from trainer.data.image_arrays import checked_labels, from_uint8, to_uint8
from trainer.invariance.batch_norm import separate_groups
from trainer.invariance.gradients import sum_and_build, update_average
from trainer.invariance.internals import compiled_by_xla
from trainer.invariance.layers import full_precision
from trainer.invariance.step import StepContext, current_step
from trainer.models.classifiers import number_of_classes
from trainer.models.image_layers import (
    CONVOLUTION,
    DiffAugment,
    ImageConv2D,
    ImageConv2DTranspose,
    prefers_many_rows,
)
from trainer.models.learning_rates import learning_rate


def classes_of(config: TrainConfig, dataset: Dataset) -> int:
    """Returns the number of classes that a conditional GAN is given.

    Raises UserError unless the data have one integer label, counted from 0, for each image.
    """
    classes = number_of_classes(config, dataset, "conditional=true", "a conditional GAN")
    label = tf.nest.flatten(dataset.spec[1])[0]
    if tf.nest.is_nested(dataset.spec[1]) or label.shape.rank != 0 or not label.dtype.is_integer:
        raise UserError(
            f"conditional=true: examples of {config.data} are {dataset.shape}: one integer label is"
            " needed"
        )
    if (labels := dataset.train.targets) is not None:
        checked_labels(labels, f"conditional=true: {config.data} has {classes} classes", classes)
    return classes


def with_labels(values: Any, labels: Any) -> Any:
    """Returns a network's input: images or noise and, unless None, their labels (rows,)."""
    return values if labels is None else [values, labels]


def twice(labels: Any) -> Any:
    """Returns the labels of real and generated images, (2 x rows,); None for None."""
    return None if labels is None else tf.concat([labels, labels], axis=0)


# Called once for each layer, so that no two layers start with equal weights.
Initializer = Callable[[], keras.initializers.Initializer]
_GLOROT = keras.initializers.GlorotUniform


def images_of(data: Any) -> Any:
    """Returns x of the `data` of train_step, which may have labels too."""
    return keras.utils.unpack_x_y_sample_weight(data)[0]


def filters(size: int, width: int) -> list[int]:
    """Returns the number of filters at each resolution, the largest first.

    Each resolution is half the one before, while that is even and above 4 pixels. Filters double,
    to at most 8 x width.
    """
    result: list[int] = []
    while size % 2 == 0 and size > 4:
        size //= 2
        result.append(width * min(2 ** len(result), 8))
    return result


def build_generator(
    config: GANConfig, initializer: Initializer = _GLOROT, classes: int = 0
) -> keras.Model:
    """Builds a network from noise to (rows, image_size, image_size, channels) in [-1, 1].

    With classes, it takes [noise, labels], with labels (rows,) int32.
    """
    widths = filters(config.image_size, config.width)
    base = config.image_size // 2 ** len(widths)

    inputs = x = keras.Input((config.latent_dim,), name="noise")
    full = {"dtype": full_precision()}
    if classes:
        label, one_hot = _one_hot(classes)
        # An array, because Keras rounds a plain number to float32.
        as_long_as_noise = layers.Rescaling(np.array([config.latent_dim**0.5]), **full)(one_hot)
        x = layers.Concatenate(**full)([inputs, as_long_as_noise])
        inputs = [inputs, label]
    x = layers.Dense(base * base * widths[-1], use_bias=False, kernel_initializer=initializer())(x)
    x = layers.Reshape((base, base, widths[-1]))(x)
    x = layers.ReLU()(_batch_norm(x))
    for channels in reversed(widths[:-1]):
        # batch norm would cancel a bias
        kernel = {"kernel_initializer": initializer(), "use_bias": False}
        x = layers.Conv2DTranspose(channels, **CONVOLUTION, **kernel)(x)
        x = layers.ReLU()(_batch_norm(x))
    x = ImageConv2DTranspose(config.channels, **CONVOLUTION, kernel_initializer=initializer())(x)
    images = layers.Activation("tanh", name="images", **full)(x)
    return keras.Model(inputs, images, name="generator")


def build_critic(
    config: GANConfig,
    initializer: Initializer = _GLOROT,
    *,
    batch_norm: bool = False,
    score_bias: bool = True,
    classes: int = 0,
) -> keras.Model:
    """Builds a network from images in [-1, 1] to unbounded scores (rows, 1).

    With `batch_norm`, every layer but the first has one, as in DCGAN. `score_bias`: whether the
    scores have a bias. With classes, it takes [images, labels].
    """
    images = keras.Input((config.image_size, config.image_size, config.channels), name="images")
    x = images
    for depth, channels in enumerate(filters(config.image_size, config.width)):
        normed = batch_norm and depth > 0
        # On images it has a faster gradient, and the same values.
        convolution = layers.Conv2D if depth else ImageConv2D
        x = convolution(
            channels, **CONVOLUTION, kernel_initializer=initializer(), use_bias=not normed
        )(x)
        x = _batch_norm(x) if normed else x
        x = layers.LeakyReLU(negative_slope=0.2)(x)
    x = layers.Flatten()(x)
    full = {"dtype": full_precision()}
    score = layers.Dense(
        1, name="score", kernel_initializer=initializer(), use_bias=score_bias, **full
    )(x)
    if not classes:
        return keras.Model(images, score, name="critic")
    label, one_hot = _one_hot(classes)
    by_class = layers.Dense(
        classes, use_bias=False, name="by_class", kernel_initializer=initializer(), **full
    )(x)
    of_class = layers.Dot(1, **full)([by_class, one_hot])
    return keras.Model([images, label], layers.Add(**full)([score, of_class]), name="critic")


def _one_hot(classes: int) -> tuple[Any, Any]:
    """Returns the input of labels, (rows,), and a vector of each that is 0 but for the class."""
    label = keras.Input((), dtype="int32", name="label")
    encoding = layers.CategoryEncoding(
        classes, output_mode="one_hot", name="classes", dtype=full_precision()
    )
    return label, encoding(label)


def _batch_norm(x: Any) -> Any:
    # With a low momentum the statistics that sampling uses follow the weights quickly.
    return layers.BatchNormalization(momentum=0.9)(x)


def scores_and_slopes(critic: Any, images: Any, labels: Any = None) -> tuple[Any, Any]:
    """Returns scores (rows, 1) and squared L2 norms of their gradients by images (rows,).

    Only for a critic without batch norm, whose score of an image depends on no other image.
    """
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(images)
        scores = critic(with_labels(images, labels), training=True)
    return scores, tf.reduce_sum(tf.square(tape.gradient(scores, images)), axis=(1, 2, 3))


class Generated(NamedTuple):
    """Holds an update's images, (rows, height, width, channels), or the noise to make them.

    noise: (rows, latent_dim); labels: (rows,), the classes, if the GAN is conditional; reals: real
        images in [-1, 1], with which the generator's loss compares the generated ones row by row.
    """

    images: Any = None
    noise: Any = None
    labels: Any = None
    reals: Any = None


class GAN(keras.Model):
    """Holds a generator, its moving average and a critic; a subclass defines their losses.

    A step has one or several updates of the critic, and then one of the generator, each with new
    noise.
    """

    # (reals, fakes, *others, global_batch_size, labels) -> losses by name, the first of which the
    # critic minimises.
    critic_losses: Callable[..., dict[str, Any]]
    # (scores of generated images, scores of the real images that they are compared with or None),
    # (rows, 1) each -> the generator's loss, summed over rows.
    generator_loss: Callable[..., Any]
    # whether the generator's loss compares each generated image with the real one of its row
    pairs_images = False
    # whether it neither draws nor sums over replicas: XLA can compile it alone
    compiles_gradients = False
    betas: tuple[float, float]  # of both Adam optimizers
    critic_batch_norm = False
    score_bias = True
    initializer: Initializer = staticmethod(_GLOROT)

    def __init__(self, config: GANConfig, dataset: Dataset) -> None:
        super().__init__(name=config.model.replace(":", "_").replace(".", "_"))
        self.settings = config
        self.latent_dim = config.latent_dim
        # The number of global batches that one step reads, each for one update of the critic.
        self.batches_per_step = config.critic_steps if isinstance(config, WGANGPConfig) else 1
        classes = classes_of(config, dataset) if config.conditional else 0
        self.generated_classes = classes
        self.generator, self.generator_average = (
            build_generator(config, self.initializer, classes) for _ in range(2)
        )
        self.critic = build_critic(
            config,
            self.initializer,
            batch_norm=self.critic_batch_norm,
            score_bias=self.score_bias,
            classes=classes,
        )
        self.generator_average.set_weights(self.generator.get_weights())
        self.generator_variables = [
            variable.value for variable in self.generator.trainable_variables
        ]
        self.critic_variables = [variable.value for variable in self.critic.trainable_variables]

        def adam(network: keras.Model, updates_per_step: int) -> Any:
            rate = learning_rate(config, dataset, self.batches_per_step, updates_per_step)
            optimizer = keras.optimizers.Adam(rate, beta_1=self.betas[0], beta_2=self.betas[1])
            return sum_and_build(optimizer, network.trainable_variables, config.precision)

        self.critic_optimizer = adam(self.critic, self.batches_per_step)
        self.generator_optimizer = adam(self.generator, 1)
        self.diff_augment = DiffAugment(config.diff_augment)
        self._compiled_gradients = tf.function(
            self.critic_gradients, jit_compile=True, autograph=False
        )
        # Traced once for all of a step's updates.
        self._traced_gradients = tf.function(self.critic_gradients, autograph=False)

    def train_step(self, data: Any) -> dict[str, Any]:
        """Returns the losses, of the critic as means over its updates.

        data: images (critic updates, rows, height, width, channels) in [0, 255], perhaps labels
            (critic updates, rows).
        """
        step = current_step()
        reals = tf.unstack(images_of(data))
        noise = step.normal((len(reals) + 1, self.latent_dim), stream="noise")
        *fakes, generated = self.images_for_updates(step, noise, self.labels_of(data))
        updates = [
            self.update_critic(step, *given)
            for given in zip(reals, fakes, *self.drawn_for_updates(step), strict=True)
        ]
        logs = {
            name: tf.add_n([update[name] for update in updates]) / len(updates)
            for name in updates[0]
        }
        if self.pairs_images:
            generated = generated._replace(reals=from_uint8(reals[-1]))
        logs["generator_loss"] = self.update_generator(step, generated)
        self.average_generator(step)
        return logs

    def drawn_for_updates(self, step: StepContext) -> list[list[Any]]:
        """Returns further arguments of `critic_losses`, (rows, …), for every critic update."""
        return []

    def augmented(self, *images: Any) -> list[Any]:
        """Returns `images`, (rows, height, width, channels) in [-1, 1], as the critic sees them.

        --diff_augment changes each by its own random numbers, all in one call.
        """
        numbers = self.diff_augment.draw(len(images))
        if numbers is None:
            return list(images)
        changed: list[Any] = tf.split(
            self.diff_augment(tf.concat(images, axis=0), numbers), len(images)
        )
        return changed

    def labels_of(self, data: Any) -> Any:
        """Returns y of train_step's `data`, (critic updates, rows); None without conditions."""
        if not self.generated_classes:
            return None
        return tf.cast(keras.utils.unpack_x_y_sample_weight(data)[1], tf.int32)

    def scores(self, images: Any, labels: Any) -> Any:
        """Returns the critic's scores in training, (rows, 1).

        labels: (rows,), or None if it takes none.
        """
        return self.critic(with_labels(images, labels), training=True)

    def images_for_updates(self, step: StepContext, noise: Any, labels: Any) -> list[Generated]:
        """Returns the generated part of each critic update and, last, of the generator's update.

        noise: (rows, critic updates + 1, latent_dim); labels: of `labels_of`; the generator's
            update takes the last.
        """
        by_update = [None] * noise.shape[1] if labels is None else [*tf.unstack(labels), labels[-1]]
        pairs = zip(tf.unstack(noise, axis=1), by_update, strict=True)
        generated = [Generated(noise=drawn, labels=of_update) for drawn, of_update in pairs]
        # several critic updates, by the same generator
        if len(generated) > 2 and not step.accumulates:
            made = zip(generated, self.fakes(*generated[:-1]), strict=False)
            generated[:-1] = [update._replace(images=images) for update, images in made]
        return generated

    def fakes(self, *updates: Generated) -> list[Any]:
        """Returns images for each critic update; these do not change the generator.

        One forward pass makes all of them, with fewer operations and all-reduces. On a CPU, a
        single replica runs the generator for each noise separately, because the activations of
        fewer rows stay in its caches.
        """
        inputs = [with_labels(update.noise, update.labels) for update in updates]
        if not prefers_many_rows() and tf.distribute.get_strategy().num_replicas_in_sync == 1:
            return [self.generator(given, training=True) for given in inputs]
        joined = tf.nest.map_structure(lambda *parts: tf.concat(parts, axis=0), *inputs)
        with separate_groups(len(inputs)):
            images: list[Any] = tf.split(self.generator(joined, training=True), len(inputs))
        return images

    def critic_gradients(self, *given: Any) -> Any:
        """Returns losses by name, and a scaled gradient per critic variable, of this replica.

        given: the arguments of `critic_losses`.
        """
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(self.critic_variables)
            losses = self.critic_losses(*given)
            scaled = self.critic_optimizer.scale_loss(next(iter(losses.values())))
        return losses, tape.gradient(scaled, self.critic_variables)

    def update_critic(self, step: StepContext, reals: Any, fakes: Generated, *others: Any) -> Any:
        """Updates the critic once; returns this replica's part of its losses.

        reals: (rows, height, width, channels) in [0, 255]; others: (rows, …), further arguments of
            `critic_losses`.
        """

        def of_micro_batch(reals: Any, fakes: Generated, *others: Any) -> Any:
            """Returns what `critic_gradients` does, of some of this replica's rows."""
            generated = fakes.images
            if generated is None:  # unless one pass has made the images of several updates
                generated = self.generator(with_labels(fakes.noise, fakes.labels), training=True)
            images = self.augmented(from_uint8(reals), generated)
            gradients_of = self.critic_gradients
            # XLA compiles parts, such as these gradients; TensorFlow sums over replicas between
            # them
            if step.in_parts:
                gradients_of = self._compiled_gradients
            elif self.batches_per_step > 1 and not compiled_by_xla():
                # XLA takes what a traced function gets from the step for constants, and would
                # compile each step anew.
                gradients_of = self._traced_gradients
            return gradients_of(*images, *others, step.global_batch_size, fakes.labels)

        losses, gradients = step.accumulate(of_micro_batch, reals, fakes, *others)
        self.critic_optimizer.apply(gradients, self.critic.trainable_variables)
        return losses

    def update_generator(self, step: StepContext, generated: "Generated") -> Any:
        """Updates the generator by its images; returns this replica's part of its loss."""
        gradients_of = partial(self.generator_gradients, global_batch_size=step.global_batch_size)
        # Waits for the critic's update, which assigns its first weights last: both at once would
        # need more memory.
        with tf.control_dependencies([self.critic_variables[0].read_value()]):
            generated = generated._replace(noise=tf.identity(generated.noise))
        loss, gradients = step.accumulate(gradients_of, generated)
        self.generator_optimizer.apply(gradients, self.generator.trainable_variables)
        return loss

    def generator_gradients(self, generated: "Generated", global_batch_size: int) -> Any:
        """Returns the loss, and a scaled gradient per generator variable, of this replica."""
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(self.generator_variables)
            images = self.generator(with_labels(generated.noise, generated.labels), training=True)
            reals = generated.reals
            labels = generated.labels
            real_scores = None if reals is None else self.scores(self.augmented(reals)[0], labels)
            scores = self.scores(self.augmented(images)[0], labels)
            loss = self.generator_loss(scores, real_scores) / global_batch_size
            scaled = self.generator_optimizer.scale_loss(loss)
        return loss, tape.gradient(scaled, self.generator_variables)

    def average_generator(self, step: StepContext) -> None:
        """Moves the average towards the generator; called once at the end of each step."""
        update_average(
            self.generator_average.trainable_variables,
            self.generator.trainable_variables,
            self.settings.ema_decay,
            step.step,
        )

    def sample(self, noise: Any, labels: Any = None) -> Any:
        """Returns uint8 images (count, …) of the averaged generator for noise (count, latent_dim).

        labels: (count,), if the GAN is conditional.
        """
        return to_uint8(
            self.averaged_generator()(with_labels(noise, labels), training=False)
        ).numpy()

    def templates(self) -> dict[str, keras.Model]:
        """Returns the models to save: averaged generator as "model", the raw one, the critic."""
        return {
            "model": self.averaged_generator(),
            "generator_raw": self.generator,
            "critic": self.critic,
        }

    def serve(self, outputs: Any) -> Any:
        """Converts the outputs of a served generator to uint8 images."""
        return to_uint8(outputs)

    def averaged_generator(self) -> keras.Model:
        """Returns the averaged generator, with the trained one's batch statistics."""
        for average, trained in zip(
            self.generator_average.non_trainable_variables,
            self.generator.non_trainable_variables,
            strict=True,
        ):
            average.assign(trained)
        return self.generator_average
