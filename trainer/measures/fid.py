"""Measures how far generated images are from real ones: FID, KID, and those of neighbours.py.

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

from trainer.base.errors import PlatformFault, UserError, reason
from trainer.base.run_files.records import QualityOf, Scalars
from trainer.base.settings.metric_names import OF_IMAGES
from trainer.base.settings.train_config import TrainConfig
from trainer.base.storage import write_whole
from trainer.base.storage.staging import stage
from trainer.cluster.strategy import Replicas
from trainer.data.examples import Examples, on_host
from trainer.data.images import noise, to_uint8
from trainer.data.order import shuffled
from trainer.measures.neighbours import Features, memorisation, neighbour_metrics
from trainer.user_code.interface import Generates, ModelInterface

LEAST_OF_A_CLASS = 100  # images, for values of a class of a conditional model
FID_FORMULAS = 2  # counts the changes of what is computed from the same images
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
        images, rows = tf.cast(images, tf.float32), images.shape[0]
        if images.shape[-1] != self._channels:
            images = tf.repeat(images, 3, axis=-1) if self._channels == 3 else tf.image.rgb_to_grayscale(images)
        if images.shape[1] != self._size:
            images = tf.image.resize(images, (self._size, self._size), antialias=True)
        return tf.cast(tf.reshape(self.network(images, training=False), (rows, -1)), tf.float32)


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


_Network = tuple[keras.Model, int, int]  # with the size and channels of its images


def _inception(weights: str, cache_dir: str) -> _Network:
    shape = (_INCEPTION_SIZE, _INCEPTION_SIZE, 3)
    found = weights if weights == "imagenet" else stage(weights, "fid_weights", cache_dir)
    inside = keras.applications.InceptionV3(include_top=False, weights=found, pooling="avg", input_shape=shape)
    images = keras.Input(shape)
    scaled = keras.layers.Rescaling(1 / 127.5, offset=-1)(images)
    return keras.Model(images, inside(scaled)), _INCEPTION_SIZE, 3


def _classifier(path: str, cache_dir: str) -> _Network:
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


class _Reals:
    """Chooses real examples by the seed, at most `samples`; `cache` is the file that holds their features."""

    def __init__(self, examples: Examples, samples: int, seed: int, batch: int, cache: Path) -> None:
        self._examples, self.count, self.cache = examples, min(samples, examples.count), cache
        chosen = np.sort(shuffled(np.arange(self.count), examples.count, seed, "fid"))
        self.rows = tf.constant(np.resize(chosen, _padded(self.count, batch)), tf.int64)
        self._about = f"{examples.count} {self.count} {seed}"

    def images(self, rows: Any) -> Any:
        """Returns the images at these positions of the chosen ones; positions after the last are padding."""
        with on_host():  # only these images go to the replica's device
            return self._examples.gather(tf.gather(self.rows, rows))[0]

    def key(self, network: str, batch: int) -> str:
        """Returns a digest of the network and the data, of which it reads the count and the first chosen batch."""
        some = self.images(tf.range(batch)).numpy().tobytes()
        return hashlib.sha256(f"float32 {network} {self._about}".encode() + some).hexdigest()


def _padded(count: int, batch: int) -> int:
    return math.ceil(count / batch) * batch


def measures(reals: Features, fakes: Features) -> Scalars:
    """Returns all measures of two sets of features but memorisation."""
    found = {"fid": frechet_distance(reals, fakes), "kid": kernel_distance(reals, fakes)}
    return found | neighbour_metrics(reals, fakes)


def measures_by_class(reals: Features, fakes: Features, labels: Any, class_names: Sequence[str]) -> dict[str, Scalars]:
    """Returns the values of each class with LEAST_OF_A_CLASS images or more, and their number as `samples`.

    labels: (images,), of real and generated ones alike. FID falls with the number of images: classes compare only with
    as many.
    """
    found = {}
    for number, name in enumerate(class_names):
        own = labels == number
        if (count := int(own.sum())) >= LEAST_OF_A_CLASS:
            found[name] = {"samples": count, **measures(reals[own], fakes[own])}
    return found


def _labels_of(reals: Examples, rows: Any, batch: int) -> Any:
    """Returns the labels of these rows, (rows,) int32: read together with their images if not in memory."""
    if reals.targets is not None:
        return reals.targets[rows.numpy()].astype(np.int32)
    parts = [reals.gather(rows[first : first + batch])[1] for first in range(0, len(rows), batch)]
    return np.concatenate([part.numpy() for part in parts]).astype(np.int32)


class Fid:
    """Measures a generator's images against as many real examples, drawn by the seed.

    A conditional generator makes an image of the class of each real one, so that values of single classes compare too.

    `unseen`: real examples that are not trained on, for memorisation. The file `cache`, and another one beside it, hold
    the features of the real examples. All features are in memory on the host in float64: 0.8 GB for 50,000 images and
    inception.
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
        unseen: Examples | None = None,
    ) -> None:
        self._model, self._replicas, self._extract = model, replicas, extract
        self.samples, batch = min(samples, reals.count), replicas.global_batch_size
        if self.samples < 2:
            raise UserError(f"fid_samples={samples} of {reals.count} examples: at least 2 are required")
        self._noise = noise(seed + 1, _padded(self.samples, batch), model.latent_dim, keras.config.floatx())
        self._reals = _Reals(reals, samples, seed, batch, cache)
        beside = cache.with_name(f"{cache.stem}-unseen.npz")
        self._unseen = None if unseen is None else _Reals(unseen, samples, seed, batch, beside)
        # Of a conditional generator: the classes of its images, those of the real ones.
        self._class_names, self._by_class = class_names, dict[str, Scalars]()
        self._labels = _labels_of(reals, self._reals.rows, batch) if class_names else None
        self._generator: Any = None
        self._of_fakes = self._extracting(self._fake_images)

    def __call__(self) -> dict[str, float]:
        """Returns the values in `names` on the chief, {} on the other workers; every worker must call it."""
        self._generator = self._model.averaged_generator()
        reals, fakes = self.real_features(), self._collect(self._of_fakes, self.samples)
        unseen = self._kept(self._unseen) if self._unseen else None
        if reals is None:
            return {}
        if self._labels is not None:
            labels = self._labels[: self.samples]
            self._by_class = measures_by_class(reals, fakes, labels, self._class_names)
        copied = {} if unseen is None else {"memorisation": memorisation(reals, fakes, unseen)}
        return {**measures(reals, fakes), **copied}

    @property
    def names(self) -> list[str]:
        """Returns the names of the values."""
        return [name for name in OF_IMAGES if self._unseen or name != "memorisation"]

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
            "unseen": self._unseen.count if self._unseen else 0,
            "formulas": FID_FORMULAS,
            **by_class,
        }

    def real_features(self) -> Features | None:
        """Returns the (samples, features) of the real examples; None on a worker that is not the chief."""
        return self._kept(self._reals)

    def _kept(self, reals: _Reals) -> Features | None:
        """Returns the features of real examples, from their file if it holds them; None on a worker but the chief."""
        key, chief = (
            reals.key(self._extract.identity, self._replicas.global_batch_size),
            self._replicas.cluster.is_chief,
        )
        cached = _cached(reals.cache, key) if chief else None
        if self._replicas.sum_over_workers([cached is not None])[0]:
            return cached
        features = self._collect(self._extracting(reals.images), reals.count)
        if not chief:
            return None
        content = io.BytesIO()
        np.savez(content, key=np.array(key), features=features)
        write_whole(reals.cache, content.getvalue())
        return features

    def _collect(self, features_of: Callable[[Any], Any], count: int) -> Features:
        """Returns the features of `count` images, computed a global batch at a time, without padding."""
        batch, first = self._replicas.global_batch_size, self._replicas.first_row

        def of_all_workers(start: int) -> Features:
            with _without_tf32():
                mine = features_of(tf.constant(start)).numpy()
            whole = np.zeros((batch, mine.shape[1]))
            whole[first : first + len(mine)] = mine
            return self._replicas.sum_over_workers(whole)

        return np.concatenate([of_all_workers(start) for start in range(0, count, batch)])[:count]

    def _fake_images(self, rows: Any) -> Any:
        given = tf.gather(self._noise, rows)
        if self._labels is not None:
            given = [given, tf.gather(self._labels, rows)]
        return to_uint8(self._generator(given, training=False))

    def _extracting(self, images_of: Callable[[Any], Any]) -> Any:
        """Returns the traced `_features` of these images."""
        return tf.function(partial(self._features, images_of), autograph=False)

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
    unseen: Examples | None = None,
) -> Fid:
    """Returns what measures a GAN's images; raises UserError if the model has no generator.

    reals: the examples that are trained on, and class_names of them; unseen: others; folder: of the files that keep
    their features.
    """
    interface = ModelInterface.of(model)
    if interface.generator is None:
        raise UserError(
            f"fid_every_steps={config.fid_every_steps}: {config.model} has no "
            f"{' and no '.join(interface.missing_for_fid)}: FID needs a generator of images: drop the flag, or add "
            "what trainer/user_code/interface.py describes"
        )
    with replicas.strategy.scope():
        extractor = Extractor(config.fid_features, config.fid_weights, config.cache_dir)
    names = class_names if interface.generated_classes else ()
    cache = folder / f".fid-{extractor.identity}.npz"
    return Fid(interface.generator, replicas, extractor, reals, config.fid_samples, config.seed, cache, names, unseen)
