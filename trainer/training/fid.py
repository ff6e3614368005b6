"""Measures how far generated images are from real ones: FID and KID, and neighbours.py's four.

FID: Heusel et al. 2017, https://arxiv.org/abs/1706.08500, the Frechet distance of two Gaussians fitted to features.
KID: Binkowski et al. 2018, https://arxiv.org/abs/1801.01401, the unbiased squared maximum mean discrepancy with a cubic
polynomial kernel. All are computed in float64 on the host, from features extracted on all replicas.
"""

import hashlib
import io
import math
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer.config.train_config import TrainConfig
from trainer.data.dataset import Examples, on_host, targets_in_memory
from trainer.data.images import noise, to_uint8
from trainer.data.order import shuffled
from trainer.distribution.strategy import Replicas
from trainer.errors import PlatformFault, UserError, reason
from trainer.interface import Generates, ModelInterface
from trainer.reporting.run_files import QualityOf, Scalars
from trainer.storage import write_whole
from trainer.storage.staging import stage
from trainer.training.neighbours import Features, neighbour_metrics

LEAST_OF_A_CLASS = 100  # images, for values of a class of a conditional model
FORMULAS = 1  # counts the changes of what is computed from the same images
_INCEPTION_SIZE = 299
_KERNEL_ROWS = 256  # of the kernel's matrix in memory at a time: about 0.3 GB with 50,000 images


def frechet_distance(one: Features, other: Features) -> float:
    """Returns |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)) of two sets of features, at least two images each."""
    difference = one.mean(axis=0) - other.mean(axis=0)
    if max(len(one), len(other)) < one.shape[1]:
        # With C1 = A^T A and C2 = B^T B, that root has the singular values of A B^T, which is smaller than C1 and C2.
        a, b = ((features - features.mean(axis=0)) / math.sqrt(len(features) - 1) for features in (one, other))
        singular = np.linalg.svd(a @ b.T, compute_uv=False)
        return float(difference @ difference + np.square(a).sum() + np.square(b).sum() - 2 * singular.sum())
    first, second = (np.atleast_2d(np.cov(features, rowvar=False)) for features in (one, other))
    # (C1 C2)^(1/2) has the trace of (C1^(1/2) C2 C1^(1/2))^(1/2), which is symmetric: no complex rounding.
    values, vectors = np.linalg.eigh(first)
    root = (vectors * np.sqrt(np.clip(values, 0, None))) @ vectors.T
    middle = np.linalg.eigvalsh(root @ second @ root)
    trace = np.sqrt(np.clip(middle, 0, None)).sum()
    return float(difference @ difference + np.trace(first) + np.trace(second) - 2 * trace)


def kernel_distance(one: Features, other: Features) -> float:
    """Returns the unbiased squared MMD with the kernel (x . y / features + 1)^3, which may be below 0."""
    m, n, scale = len(one), len(other), one.shape[1]

    def kernel_sum(products: Features) -> float:
        k = products / scale + 1
        return float((k * k * k).sum())

    def total(a: Features, b: Features) -> float:
        return sum(kernel_sum(a[row : row + _KERNEL_ROWS] @ b.T) for row in range(0, len(a), _KERNEL_ROWS))

    def within(a: Features) -> float:
        with_itself = kernel_sum(np.einsum("ij,ij->i", a, a))
        return (total(a, a) - with_itself) / (len(a) * (len(a) - 1))

    return within(one) + within(other) - 2 * total(one, other) / (m * n)


class Extractor:
    """Extracts features of images with a network: `inception`, or a saved classifier's penultimate layer.

    They do not depend on the run's precision: inception computes in float32, a classifier as it was saved, and neither
    in TensorFloat-32.
    """

    def __init__(self, name: str, weights: str, cache_dir: str = "") -> None:
        self.name = name  # as the user gave it
        try:
            with _in_float32():
                found = _inception(weights, cache_dir) if name == "inception" else _classifier(name, cache_dir)
        except (UserError, PlatformFault):
            raise
        except Exception as error:  # Keras raises many types without a network, and for a file of something else
            own = "a classifier of yours with --fid_features=PATH/model.keras"
            advice = f"use its weights with --fid_weights=PATH, or {own}" if name == "inception" else f"use {own}"
            raise UserError(f"fid_features={name}: cannot be loaded ({reason(error)}): {advice}") from error
        self.network, self._size, self._channels = found

    @cached_property
    def identity(self) -> str:
        """Returns a digest of the network's input and weights, whatever it is called."""
        digest = hashlib.sha256(f"{self._size} {self._channels}".encode())
        for weight in self.network.get_weights():
            digest.update(weight.tobytes())
        return digest.hexdigest()[:16]

    def __call__(self, images: Any) -> Any:
        """Maps (rows, height, width, channels) grey levels in [0, 255] to (rows, features) float32."""
        images = tf.cast(images, tf.float32)
        if images.shape[-1] != self._channels:
            images = tf.repeat(images, 3, axis=-1) if self._channels == 3 else tf.image.rgb_to_grayscale(images)
        if images.shape[1] != self._size:
            images = tf.image.resize(images, (self._size, self._size), antialias=True)
        return tf.cast(tf.reshape(self.network(images, training=False), (images.shape[0], -1)), tf.float32)


@contextmanager
def _in_float32() -> Iterator[None]:
    """Makes layers built within the block compute in float32, whatever the precision of the run."""
    floatx, policy = keras.config.floatx(), keras.config.dtype_policy()
    try:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")
        yield
    finally:
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(policy)


@contextmanager
def _without_tf32() -> Iterator[None]:
    """Makes float32 products within the block exact to float32, whatever the run's `tf32`."""
    switch = tf.config.experimental
    before = switch.tensor_float_32_execution_enabled()
    switch.enable_tensor_float_32_execution(False)
    try:
        yield
    finally:
        switch.enable_tensor_float_32_execution(before)


def _inception(weights: str, cache_dir: str) -> tuple[keras.Model, int, int]:
    shape = (_INCEPTION_SIZE, _INCEPTION_SIZE, 3)
    found = weights if weights == "imagenet" else stage(weights, "fid_weights", cache_dir)
    inside = keras.applications.InceptionV3(include_top=False, weights=found, pooling="avg", input_shape=shape)
    images = keras.Input(shape)
    scaled = keras.layers.Rescaling(1 / 127.5, offset=-1)(images)
    return keras.Model(images, inside(scaled)), _INCEPTION_SIZE, 3


def _classifier(path: str, cache_dir: str) -> tuple[keras.Model, int, int]:
    model = keras.models.load_model(stage(path, "fid_features", cache_dir), compile=False)
    shape, features = model.input_shape, model.layers[-2].output
    if len(shape) != 4 or shape[1] != shape[2] or shape[3] not in (1, 3):
        raise UserError(f"fid_features={path}: its input is {shape}: a classifier of square images is required")
    return keras.Model(model.inputs, features), shape[1], shape[3]


def _cached(cache: Path, key: str) -> Features | None:
    """Returns the features in `cache`; None if the file is missing, damaged or for another key."""
    try:
        with np.load(cache, allow_pickle=False) as content:
            return np.asarray(content["features"], np.float64) if str(content["key"]) == key else None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def distances(reals: Features, fakes: Features) -> Scalars:
    """Returns metric_names.OF_IMAGES for the features of real and of generated images."""
    found = {"fid": frechet_distance(reals, fakes), "kid": kernel_distance(reals, fakes)}
    return found | neighbour_metrics(reals, fakes)


def distances_by_class(reals: Features, fakes: Features, labels: Any, class_names: Sequence[str]) -> dict[str, Scalars]:
    """Returns the values of each class with LEAST_OF_A_CLASS images or more, and their number as `samples`.

    labels: (images,), of real and generated ones alike. FID falls with the number of images: classes compare only with
    as many.
    """
    found = {}
    for number, name in enumerate(class_names):
        own = labels == number
        if (count := int(own.sum())) >= LEAST_OF_A_CLASS:
            found[name] = {"samples": count, **distances(reals[own], fakes[own])}
    return found


def _labels_of(reals: Examples, rows: Any, batch: int) -> Any:
    """Returns the labels of these rows, (rows,) int32: read together with their images if not in memory."""
    known = targets_in_memory(reals)
    if known is not None:
        return known[rows.numpy()].astype(np.int32)
    parts = [reals.gather(rows[first : first + batch])[1] for first in range(0, len(rows), batch)]
    return np.concatenate([part.numpy() for part in parts]).astype(np.int32)


class Fid:
    """Measures a generator's images against as many real examples, drawn by the seed.

    A conditional generator makes an image of the class of each real one, so that values of single classes compare too.

    The file `cache` holds the features of the real examples. All features of both are in memory on the host in float64:
    0.8 GB each for 50,000 images and inception.
    """

    def __init__(
        self,
        model: Generates,
        replicas: Replicas,
        extract: Extractor,
        reals: Examples,
        samples: int,
        seed: int,
        cache: Path,
        class_names: Sequence[str] = (),
    ) -> None:
        self._model, self._replicas, self._extract, self._reals = model, replicas, extract, reals
        self.samples, self._seed, self._cache = min(samples, reals.count), seed, cache
        if self.samples < 2:
            raise UserError(f"fid_samples={samples} of {reals.count} examples: at least 2 are required")
        batch = replicas.global_batch_size
        padded = math.ceil(self.samples / batch) * batch
        self._noise = noise(seed + 1, padded, model.latent_dim, keras.config.floatx())
        chosen = shuffled(np.arange(self.samples), reals.count, seed, "fid")
        self._rows = tf.constant(np.resize(np.sort(chosen), padded), tf.int64)
        # Of a conditional generator: the classes of its images, those of the real ones.
        self._class_names, self._by_class = class_names, dict[str, Scalars]()
        self._labels = _labels_of(reals, self._rows, batch) if class_names else None
        self._generator: Any = None
        self._of_reals = tf.function(partial(self._features, self._real_images), autograph=False)
        self._of_fakes = tf.function(partial(self._features, self._fake_images), autograph=False)

    def __call__(self) -> dict[str, float]:
        """Returns metric_names.OF_IMAGES on the chief, {} on the other workers; every worker must call it."""
        self._generator = self._model.averaged_generator()
        reals, fakes = self.real_features(), self._collect(self._of_fakes)
        if reals is None:
            return {}
        if self._labels is not None:
            labels = self._labels[: self.samples]
            self._by_class = distances_by_class(reals, fakes, labels, self._class_names)
        return distances(reals, fakes)

    @property
    def about(self) -> QualityOf:
        """Returns what values must have in common to be compared: network, its digest, images and formulas.

        On the chief, the newest values by class of a conditional generator too, as `by_class`.
        """
        by_class: QualityOf = {"by_class": self._by_class} if self._by_class else {}
        return {
            "features": self._extract.name,
            "features_sha256": self._extract.identity,
            "samples": self.samples,
            "formulas": FORMULAS,
            **by_class,
        }

    def real_features(self) -> Features | None:
        """Returns the (samples, features) of the real examples; None on a worker that is not the chief."""
        key, chief = self._key(), self._replicas.cluster.is_chief
        cached = _cached(self._cache, key) if chief else None
        if self._replicas.sum_over_workers([cached is not None])[0]:
            return cached
        features = self._collect(self._of_reals)
        if not chief:
            return None
        content = io.BytesIO()
        np.savez(content, key=np.array(key), features=features)
        write_whole(self._cache, content.getvalue())
        return features

    def _key(self) -> str:
        """Returns a digest of the network and the data, of which it reads the count and the first chosen batch."""
        some = self._reals.gather(self._rows[: self._replicas.global_batch_size])[0].numpy().tobytes()
        data = f"float32 {self._extract.identity} {self._reals.count} {self.samples} {self._seed}".encode() + some
        return hashlib.sha256(data).hexdigest()

    def _collect(self, features_of: Callable[[Any], Any]) -> Features:
        """Returns the features of all samples, computed a global batch at a time, without padding."""
        batch, first = self._replicas.global_batch_size, self._replicas.first_row

        def of_all_workers(start: int) -> Features:
            with _without_tf32():
                mine = features_of(tf.constant(start)).numpy()
            whole = np.zeros((batch, mine.shape[1]))
            whole[first : first + len(mine)] = mine
            return self._replicas.sum_over_workers(whole)

        found = [of_all_workers(start) for start in range(0, len(self._noise), batch)]
        return np.concatenate(found)[: self.samples]

    def _real_images(self, rows: Any) -> Any:
        with on_host():  # only these images go to the replica's device
            return self._reals.gather(tf.gather(self._rows, rows))[0]

    def _fake_images(self, rows: Any) -> Any:
        given = tf.gather(self._noise, rows)
        if self._labels is not None:
            given = [given, tf.gather(self._labels, rows)]
        return to_uint8(self._generator(given, training=False))

    def _features(self, images_of: Callable[[Any], Any], start: Any) -> Any:
        """Returns the features of this worker's rows of the global batch at `start`, computed on all replicas."""

        def on_replica() -> Any:
            replica, rows = tf.distribute.get_replica_context().replica_id_in_sync_group, self._replicas.rows
            return self._extract(images_of(start + replica * rows + tf.range(rows)))

        strategy = self._replicas.strategy
        found = strategy.run(tf.autograph.experimental.do_not_convert(on_replica))
        return tf.concat(strategy.experimental_local_results(found), axis=0)


def make_fid(
    config: TrainConfig,
    model: keras.Model,
    reals: Examples,
    replicas: Replicas,
    folder: Path,
    class_names: Sequence[str] = (),
) -> Fid:
    """Returns what measures FID and KID, with its cache in `folder`; raises UserError if the model has no generator.

    class_names: of the real examples.
    """
    interface = ModelInterface.of(model)
    if interface.generator is None:
        raise UserError(
            f"fid_every_steps={config.fid_every_steps}: {config.model} has no "
            f"{' and no '.join(interface.missing_for_fid)}: FID needs a generator of images: drop the flag, or add "
            "what trainer/interface.py describes"
        )
    with replicas.strategy.scope():
        extractor = Extractor(config.fid_features, config.fid_weights, config.cache_dir)
    names = class_names if interface.generated_classes else ()
    cache = folder / f".fid-{extractor.identity}.npz"
    return Fid(interface.generator, replicas, extractor, reals, config.fid_samples, config.seed, cache, names)
