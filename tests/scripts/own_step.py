"""Has a train_step of its own, a dictionary of inputs, and a strategy that it makes itself."""

from typing import Any

import keras
import tensorflow as tf

from tests.scripts.shared import Interrupt, write, x, y

strategy = tf.distribute.MirroredStrategy()
for gpu in tf.config.list_physical_devices("GPU"):
    tf.config.experimental.set_memory_growth(gpu, True)


class Network(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = keras.layers.Dense(7, "relu")
        self.head = keras.layers.Dense(3)
        self.mean_loss = keras.metrics.Mean(name="loss")

    def call(self, inputs: Any) -> Any:
        return self.head(keras.ops.concatenate([self.hidden(inputs["wide"]), inputs["narrow"]], -1))

    @property
    def metrics(self) -> list[keras.Metric]:
        return [self.mean_loss]

    def train_step(self, data: Any) -> dict[str, Any]:
        inputs, labels = data
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(
                labels, self(inputs), from_logits=True
            )
            mean = keras.ops.mean(losses)
        self.optimizer.apply(
            tape.gradient(mean, self.trainable_variables), self.trainable_variables
        )
        self.mean_loss.update_state(losses)
        return {"loss": self.mean_loss.result()}


with strategy.scope():
    model = Network()
    model.compile(optimizer="rmsprop")
write(
    model,
    model.fit(
        {"wide": x, "narrow": x[:, :2]},
        y,
        epochs=3,
        batch_size=10,
        shuffle=False,
        verbose=0,
        callbacks=[Interrupt()],
    ),
)
