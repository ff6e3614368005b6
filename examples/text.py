"""python -m trainer.task --model=examples.text:build --data=examples.text:data \
    --learning_rate=1e-3 --epochs=3 --evaluation_fraction=0.2 --job_dir=runs/text

Tells spam from other messages by a small transformer, which reads text: the vocabulary, made from
the messages of the run, is part of the model, so that new messages have the same words. The
messages are a file of lines `ham<TAB>text` and `spam<TAB>text`: add --messages=FILE. Without it,
2,000 messages are generated, too easy: val_accuracy becomes 0.9975. On the 5,574 of
https://archive.ics.uci.edu/dataset/228/sms+spam+collection it becomes 0.979.
"""

from pathlib import Path
from typing import Any

import keras
import numpy as np

from trainer.base.errors import UserError
from trainer.base.settings.train_config import TrainConfig
from trainer.data.dataset import Dataset

# size of the vocabulary, and words of a message that are read
WORDS = 5000
LENGTH = 40
COMMON = "you the to at home tomorrow see call it me"
SUSPECT = "win free prize cash now claim text urgent"


def data(config: TrainConfig, *, messages: str = "") -> Any:
    """Returns (x, y): the texts (messages,), and 1 for spam (messages,)."""
    lines = Path(messages).read_text(encoding="utf-8-sig").split("\n") if messages else generated()
    found = [line.split("\t", 1) for line in lines if line.startswith(("ham\t", "spam\t"))]
    if not found:
        raise UserError(
            f"messages={messages}: it has no line that begins with ham or spam and a tab"
        )
    labels, texts = zip(*found, strict=True)
    return np.array(texts), np.array([label == "spam" for label in labels], "int32")


def generated() -> list[str]:
    """Returns 2,000 lines; a quarter of them are spam, with some suspect words."""
    draw = np.random.default_rng(0)
    lines = []
    for number in range(2000):
        words = draw.choice(COMMON.split(), draw.integers(3, 20))
        suspect = draw.choice(SUSPECT.split(), 3 if number % 4 == 0 else 0)
        text = " ".join(draw.permutation([*words, *suspect]))
        lines.append(f"{'ham' if number % 4 else 'spam'}\t{text}")
    return lines


@keras.saving.register_keras_serializable("examples")
class Positions(keras.layers.Layer):
    """Adds a learned vector for each position to (messages, length, width)."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.supports_masking = True  # passes on which words are missing

    def build(self, shape: Any) -> None:
        """Makes the vectors."""
        self.vectors = self.add_weight(shape=shape[1:], name="vectors")

    def call(self, words: Any) -> Any:
        """Returns the sums."""
        return words + self.vectors


def build(config: TrainConfig, dataset: Dataset, *, messages: str = "") -> keras.Model:
    """Returns a compiled Keras model: one transformer block over the words, then their mean."""
    words = keras.layers.TextVectorization(WORDS, output_sequence_length=LENGTH)
    words.adapt(data(config, messages=messages)[0])
    text = keras.Input((), dtype="string")
    tokens = words(text)
    x = Positions()(keras.layers.Embedding(WORDS, 32, mask_zero=True)(tokens))
    attended = keras.layers.MultiHeadAttention(num_heads=2, key_dim=16)(x, x)
    x = keras.layers.LayerNormalization()(x + attended)
    hidden = keras.layers.Dense(32)(keras.layers.Dense(64, activation="relu")(x))
    x = keras.layers.LayerNormalization()(x + hidden)
    spam = keras.layers.Dense(1, activation="sigmoid")(keras.layers.GlobalAveragePooling1D()(x))
    model = keras.Model(text, spam)
    model.compile(
        keras.optimizers.Adam(config.learning_rate),
        loss="binary_crossentropy",
        metrics=["accuracy", "auc"],
    )
    return model
