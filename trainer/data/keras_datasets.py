"""Data sets that Keras downloads, where the network allows: mnist, fashion_mnist, cifar10."""

from typing import Any

import keras

from trainer.config.train_config import TrainConfig
from trainer.data.arrays import arrays_dataset
from trainer.data.dataset import Dataset
from trainer.errors import UserError, reason

_CLASSES = {
    "fashion_mnist": "T-shirt Trouser Pullover Dress Coat Sandal Shirt Sneaker Bag Boot",
    "cifar10": "airplane automobile bird cat deer dog frog horse ship truck",
}


def load(config: TrainConfig) -> Dataset:
    """The data set of that name, from Keras's own cache (~/.keras/datasets) or by download."""
    module: Any = getattr(keras.datasets, config.data)
    try:
        (images, labels), (test_images, test_labels) = module.load_data()
    except Exception as error:  # urllib, ssl, zip: whatever keeps a download from ending well
        raise UserError(
            f"data={config.data}: cannot be downloaded here ({reason(error)}): give --data=FOLDER with the files"
        ) from None
    class_names = tuple(_CLASSES.get(config.data, "").split())
    return arrays_dataset(config, images, labels, test_images, test_labels, class_names)
