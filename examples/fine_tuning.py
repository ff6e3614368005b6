"""python -m trainer.task --model=examples.fine_tuning:build --data=digits --image_size=32 \
    --channels=3 --weights=none --evaluation_fraction=0.2 --learning_rate=1e-3 --epochs=1 \
    --job_dir=runs/fine_tuning

Trains MobileNetV2, as Keras has it, for classes of your own. This command needs no network, and
only shows that it runs: it starts from random weights, on the digits in the package.
`--weights=imagenet --data=FOLDER --image_size=96 --learning_rate=1e-4` tunes the weights of
ImageNet, which Keras downloads, for your photos in class folders.
"""

import keras
from keras import layers

from trainer.base.settings.train_config import TrainConfig
from trainer.data.dataset import Dataset


def build(config: TrainConfig, dataset: Dataset, *, weights: str = "imagenet") -> keras.Model:
    """Returns a compiled Keras classifier of images from 0 to 255."""
    network = keras.applications.MobileNetV2(
        dataset.image_shape,
        alpha=0.35,
        include_top=False,
        pooling="avg",
        weights=None if weights == "none" else weights,
    )
    model = keras.Sequential(
        [
            keras.Input(dataset.image_shape),
            layers.Rescaling(1 / 127.5, offset=-1),
            network,
            layers.Dropout(0.2),
            layers.Dense(len(dataset.class_names), activation="softmax"),
        ]
    )
    optimizer = keras.optimizers.Adam(config.learning_rate)
    model.compile(optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return model
