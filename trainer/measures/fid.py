"""Measures how far generated images are from real ones: FID, KID, and what nearest neighbours tell.

FID: Heusel et al. 2017, https://arxiv.org/abs/1706.08500, the Frechet distance of two Gaussians
    fitted to features.
KID: Binkowski et al. 2018, https://arxiv.org/abs/1801.01401, the unbiased squared maximum mean
    discrepancy with a cubic polynomial kernel. Precision and recall: Kynkaanniemi et al. 2019,
    https://arxiv.org/abs/1904.06991. Density and
coverage: Naeem et al. 2020, https://arxiv.org/abs/2002.09797. These four tell how many generated
    images look real, and how many real ones they cover: a set of images is taken for the union of
    balls around their features, each of which reaches to its centre's fifth nearest neighbour in
    the set. All are computed in float64 on the host, from features that all replicas extract.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from trainer.base.errors import PlatformFault, UserError, reason
from trainer.base.run_files.job_files import QualityOf
from trainer.base.settings.rules import IMAGE_MEASURES
from trainer.base.settings.train_config import TrainConfig
from trainer.base.storage.staging import stage
from trainer.cluster.strategy import Replicas
from trainer.data.examples import HOST, Examples
from trainer.data.image_arrays import to_uint8
from trainer.data.order import shuffled
from trainer.data.sample_grids import noise
from trainer.user_code.interface import ModelInterface, UserModel

Features = npt.NDArray[np.float64]  # (images, features)

NEIGHBOURS = 5
MOST_IMAGES = 10_000  # of each set: the distances between 10,000 and 10,000 take seconds
_ROWS = 256  # of the distances in memory at a time: 20 MB


def neighbour_metrics(real: Features, fake: Features) -> dict[str, float]:
    """Returns precision, recall, density and coverage of generated images; {} if there are too few.

    At most MOST_IMAGES of each set are compared. All but density are at most 1, and higher is
    better.
    """
    real, fake = (  # evenly spread: they may be sorted by class
        features[
            np.linspace(0, len(features) - 1, min(len(features), MOST_IMAGES)).astype(np.int64)
        ]
        for features in (real, fake)
    )
    if min(len(real), len(fake)) <= NEIGHBOURS:
        return {}
    real_radii = _radii(real)
    fake_radii = _radii(fake)
    within_real = np.zeros(len(fake))  # how many balls of real images hold each generated one
    within_fake = np.zeros(len(real), bool)
    nearest = np.full(len(real), np.inf)
    for rows, distances in _distances(fake, real):
        within_real[rows] = (distances < real_radii).sum(axis=1)
        within_fake |= (distances < fake_radii[rows, np.newaxis]).any(axis=0)
        nearest = np.minimum(nearest, distances.min(axis=0))
    return {
        "precision": float((within_real > 0).mean()),
        "recall": float(within_fake.mean()),
        "density": float(within_real.mean() / NEIGHBOURS),
        "coverage": float((nearest < real_radii).mean()),
    }


def _radii(features: Features) -> Features:
    """Returns the squared distance of each row to the fifth nearest other row."""
    radii = np.empty(len(features))
    for rows, distances in _distances(features, features):
        distances[np.arange(len(distances)), np.arange(len(features))[rows]] = np.inf
        radii[rows] = np.partition(distances, NEIGHBOURS - 1, axis=1)[:, NEIGHBOURS - 1]
    return radii


def _distances(images: Features, centres: Features) -> Iterator[tuple[slice, Features]]:
    """Yields a slice of `images`, and the squared distances of these rows to all `centres`."""
    squares = np.einsum("ij,ij->i", images, images)
    others = np.einsum("ij,ij->i", centres, centres)
    for start in range(0, len(images), _ROWS):
        rows = slice(start, start + _ROWS)
        yield (
            rows,
            np.maximum(squares[rows, np.newaxis] + others - 2 * images[rows] @ centres.T, 0.0),
        )


FID_FORMULAS = 2  # counts up when the same images come to give other values
_INCEPTION_SIZE = 299
_KERNEL_ROWS = 256  # of the kernel's matrix in memory at a time: about 0.3 GB with 50,000 images


def frechet_distance(reals: Features, fakes: Features) -> float:
    """Returns |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)), of two or more images each."""
    difference = reals.mean(axis=0) - fakes.mean(axis=0)
    # With C1 = A^T A and C2 = B^T B, that root has the trace of (A B^T B A^T)^(1/2), which is
    # symmetric: no complex rounding. The factors A and B are triangular, with no more rows than
    # there are images or features.
    factors = list[Any](
        np.linalg.qr((features - features.mean(axis=0)) / math.sqrt(len(features) - 1), mode="r")
        for features in (reals, fakes)
    )
    product = factors[0] @ factors[1].T
    roots = np.sqrt(np.clip(np.linalg.eigvalsh(product @ product.T), 0, None))
    traces = sum(np.square(factor).sum() for factor in factors)
    return float(difference @ difference + traces - 2 * roots.sum())


def kernel_distance(reals: Features, fakes: Features) -> float:
    """Returns the unbiased squared MMD, maybe below 0, with (x . y / features + 1)^3."""

    def kernel_sum(products: Features) -> float:
        k = products / reals.shape[1] + 1
        return float((k * k * k).sum())

    def total(a: Features, b: Features) -> float:
        return sum(
            kernel_sum(a[row : row + _KERNEL_ROWS] @ b.T) for row in range(0, len(a), _KERNEL_ROWS)
        )

    # The unbiased mean over pairs of one set leaves out each image's pair with itself.
    real, fake = (
        (total(a, a) - kernel_sum(np.einsum("ij,ij->i", a, a))) / (len(a) * (len(a) - 1))
        for a in (reals, fakes)
    )
    return real + fake - 2 * total(reals, fakes) / (len(reals) * len(fakes))


class Extractor:
    """Extracts features of images by `inception`, or a classifier's penultimate layer.

    name: inception, which downloads the weights of ImageNet; the path of a .h5 file with these; or
        that of a .keras file of a classifier.

    The features do not depend on the run's precision: inception computes in float32, a classifier
    in the precision in which it was saved, and neither in TensorFloat-32.
    """

    def __init__(self, name: str, cache_dir: str = "") -> None:
        self.name = name  # as the user gave it
        floatx = keras.config.floatx()
        policy = keras.config.dtype_policy()
        try:
            keras.config.set_floatx("float32")
            keras.config.set_dtype_policy("float32")
            file = None if name == "inception" else stage(name, "fid_features", cache_dir)
            if file is None or file.suffix == ".h5":
                backbone = keras.applications.InceptionV3(
                    include_top=False,
                    weights=str(file or "imagenet"),
                    pooling="avg",
                    input_shape=(_INCEPTION_SIZE, _INCEPTION_SIZE, 3),
                )
                images = keras.Input(backbone.input_shape[1:])
                scaled = keras.layers.Rescaling(1 / 127.5, offset=-1)(images)
                network = keras.Model(images, backbone(scaled))
            else:  # a saved classifier up to its penultimate layer
                model = keras.models.load_model(file, compile=False)
                shape = model.input_shape
                network = keras.Model(model.inputs, model.layers[-2].output)
                square = len(shape) == 4 and shape[1] and shape[1] == shape[2]
                if not square or shape[3] not in (1, 3):
                    raise UserError(
                        f"fid_features={name}: its input is {shape}: a classifier of square images"
                        " of one size is required"
                    )
        except (UserError, PlatformFault):
            raise
        # Keras raises many types without a network, and for a file of something else
        except Exception as error:
            advice = "a classifier of yours with --fid_features=PATH/model.keras"
            weights = "its weights of ImageNet, without the top, with --fid_features=PATH.h5, or "
            advice = f"use {weights if name == 'inception' else ''}{advice}"
            raise UserError(
                f"fid_features={name}: cannot be loaded ({reason(error)}): {advice}"
            ) from error
        finally:
            keras.config.set_floatx(floatx)
            keras.config.set_dtype_policy(policy)
        self.network = network
        *_, self._size, self._channels = network.input_shape

    @cached_property
    def identity(self) -> str:
        """Returns a digest of the network's input and weights, whatever it is called."""
        digest = hashlib.sha256(f"{self._size} {self._channels}".encode())
        for weight in self.network.get_weights():
            digest.update(weight.tobytes())
        return digest.hexdigest()[:16]

    def __call__(self, images: Any) -> Any:
        """Maps (rows, height, width, channels), 0 to 255, to (rows, features) float32."""
        images, rows = tf.cast(images, tf.float32), images.shape[0]
        if images.shape[-1] != self._channels:
            images = (
                tf.repeat(images, 3, axis=-1)
                if self._channels == 3
                else tf.image.rgb_to_grayscale(images)
            )
        if images.shape[1] != self._size:
            images = tf.image.resize(images, (self._size, self._size), antialias=True)
        return tf.cast(tf.reshape(self.network(images, training=False), (rows, -1)), tf.float32)


class Fid:
    """Measures a generator's images against as many real examples, at most `samples`.

    A conditional generator makes an image of the class of each real one. The features of the real
    examples are extracted once a process. All are in the chief's memory on the host in float64: 0.8
    GB for 50,000 images and inception. reals: the training examples. Raises UserError if the model
    has no generator of images.
    """

    names = IMAGE_MEASURES

    def __init__(
        self, config: TrainConfig, model: Any, reals: Examples, replicas: Replicas
    ) -> None:
        interface = ModelInterface.of(model)
        if interface.missing_for_fid:
            raise UserError(
                f"fid_every_steps={config.fid_every_steps}: {config.model} has no"
                f" {' and no '.join(interface.missing_for_fid)}: FID needs a generator of images:"
                " drop the flag, or add what trainer/user_code/interface.py describes"
            )
        self._model: UserModel = model
        self._replicas = replicas
        with replicas.strategy.scope():
            self._extract = Extractor(config.fid_features, config.cache_dir)
        self.samples = min(config.fid_samples, reals.count)
        self._real_features: Features | None = None  # (samples, features)
        batch = replicas.global_batch_size
        padded = math.ceil(self.samples / batch) * batch
        chosen = np.sort(shuffled(np.arange(self.samples), reals.count, config.seed, "fid"))
        self._rows = tf.constant(np.resize(chosen, padded), tf.int64)
        self._noise = noise(config.seed + 1, padded, self._model.latent_dim, keras.config.floatx())
        self._labels: Any = None
        if interface.generated_classes:
            parts = (
                reals.gather(self._rows[at : at + batch])[1].numpy()
                for at in range(0, padded, batch)
            )
            self._labels = np.concatenate([*parts]).astype(np.int32)
        self._generator: Any = None

        def real_images(rows: Any) -> Any:
            with tf.device(HOST):  # only these images are copied to the replica's device
                return reals.gather(tf.gather(self._rows, rows))[0]

        def fake_images(rows: Any) -> Any:
            inputs = tf.gather(self._noise, rows)
            if self._labels is not None:
                inputs = [inputs, tf.gather(self._labels, rows)]
            return to_uint8(self._generator(inputs, training=False))

        self._of_reals = self._extracting(real_images)
        self._of_fakes = self._extracting(fake_images)

    def __call__(self) -> dict[str, float]:
        """Returns the values in `names` on the chief, {} on the other workers; every worker must
        call it."""
        self._generator = self._model.averaged_generator()
        if self._real_features is None:
            self._real_features = self._collect(self._of_reals)
        reals = self._real_features
        fakes = self._collect(self._of_fakes)
        if not self._replicas.cluster.is_chief:
            return {}
        distances = {"fid": frechet_distance(reals, fakes), "kid": kernel_distance(reals, fakes)}
        return distances | neighbour_metrics(reals, fakes)

    @property
    def about(self) -> QualityOf:
        """Returns what comparable values share: network, its digest, images and formulas."""
        return {
            "features": self._extract.name,
            "features_sha256": self._extract.identity,
            "samples": self.samples,
            "formulas": FID_FORMULAS,
        }

    def _collect(self, features_of: Callable[[Any], Any]) -> Features:
        """Returns the features of `samples` images, by global batches; none on other workers."""
        batch = self._replicas.global_batch_size
        first = self._replicas.first_row

        def of_all_workers(start: int) -> Features:
            features = features_of(tf.constant(start)).numpy()
            whole = np.zeros((batch, features.shape[1]))
            whole[first : first + len(features)] = features
            summed = self._replicas.sum_over_workers(whole)
            return summed if self._replicas.cluster.is_chief else np.empty((0, features.shape[1]))

        before = tf.config.experimental.tensor_float_32_execution_enabled()
        # Products are exact to float32, whatever the run's `tf32`.
        tf.config.experimental.enable_tensor_float_32_execution(False)
        try:
            return np.concatenate(
                [of_all_workers(start) for start in range(0, self.samples, batch)]
            )[: self.samples]
        finally:
            tf.config.experimental.enable_tensor_float_32_execution(before)

    def _extracting(self, images_of: Callable[[Any], Any]) -> Any:
        """Returns a tf.function to the features of this worker's rows of the batch at `start`."""
        strategy = self._replicas.strategy
        rows = self._replicas.rows

        def on_replica(start: Any) -> Any:
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            return self._extract(images_of(start + replica * rows + tf.range(rows)))

        def on_replicas(start: Any) -> Any:
            features = strategy.run(
                tf.autograph.experimental.do_not_convert(on_replica), args=(start,)
            )
            return tf.concat(strategy.experimental_local_results(features), axis=0)

        return tf.function(on_replicas, autograph=False)
