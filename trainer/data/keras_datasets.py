"""Loads data sets that Keras downloads: mnist, fashion_mnist, cifar10."""

from typing import Any

import keras

from trainer.base.errors import UserError, reason
from trainer.base.settings.train_config import TrainConfig
from trainer.data.dataset import Dataset
from trainer.data.image_arrays import arrays_dataset

_CLASSES = {
    "fashion_mnist": "T-shirt Trouser Pullover Dress Coat Sandal Shirt Sneaker Bag Boot",
    "cifar10": "airplane automobile bird cat deer dog frog horse ship truck",
}


def load(config: TrainConfig) -> Dataset:
    """Returns the data set that `config.data` names, from Keras's cache (~/.keras/datasets) or by download."""
    module: Any = getattr(keras.datasets, config.data)
    try:
        (images, labels), (test_images, test_labels) = module.load_data()
    except Exception as error:  # of urllib, ssl, zipfile and others
        raise UserError(
            f"data={config.data}: download failed ({reason(error)}): use --data=FOLDER with the files"
        ) from None
    class_names = tuple(_CLASSES.get(config.data, "").split())
    return arrays_dataset(config, images, labels, test_images, test_labels, class_names)
