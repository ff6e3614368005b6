"""Defines the settings of a run, with meaning, unit and limits. Imports no TensorFlow.

The settings of one model alone are keyword-only parameters of its `build`. Limits of one setting
are checked by `fields.coerce`, contradictions of several by `rules.check`; what other modules
derive from several settings is here.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from trainer.base.errors import UserError
from trainer.base.settings.fields import setting

# Names of built-in functions; a user's own `package.module:function` is used as it is.
DATA_SOURCES = {
    "digits": "trainer.data.image_arrays:load_digits",
    "mnist": "trainer.data.image_arrays:load_keras",
    "fashion_mnist": "trainer.data.image_arrays:load_keras",
    "cifar10": "trainer.data.image_arrays:load_keras",
}

# Prefixes of a path, as in folder:photos, for data whose kind is not recognised.
DATA_KINDS = ("idx", "npz", "tfrecord", "shards", "folder")

# Names for `augment`, one or several, separated by commas.
AUGMENTATIONS = ("flip", "crop")


def in_group(group: str) -> Callable[..., Any]:
    """Returns a function that declares settings of a group of --help.

    An empty text may replace that of a recipe.
    """

    def declare(default: Any, meaning: str, **rules: Any) -> Any:
        may_be_empty = default in ("", (), {})
        return setting(default, meaning, **{"group": group, "may_be_empty": may_be_empty, **rules})

    return declare


# The first group has what a model of your own needs.
_run = in_group("run")
_training = in_group("training")
_data = in_group("data")
_devices = in_group("devices")
_output = in_group("output")
_images = in_group("images and GANs")

_OPTIMIZER = (
    "the model has an optimizer of its own: give it learning_rate(config, dataset) of"
    " trainer.models.learning_rates"
)
_PIXELS = "the data have examples of their own shape: let their function read it from its config"


@dataclass(frozen=True, eq=False)
class TrainConfig:
    """Holds every setting of a run.

    Field names are the flags, the keys of a recipe and the keys of run.json.

    A resolved config is of a subclass that `OwnSettings` makes, with the settings of its model,
    data and callbacks.
    """

    recipe: str = _run("", "name or path of the recipe", may_be_empty=False)
    job_dir: str = _run(
        "", "folder or gs:// address that the run writes to, and resumes from", may_be_empty=False
    )
    model: str = _run("wgan_gp", "a model's name, or your own package.module:function")
    data: str = _run(
        "digits",
        "a source's name, a path, kind:path, or your own package.module:function",
        may_be_empty=True,
    )
    callbacks: str = _run(
        "", "package.module:function that returns a list of Keras callbacks, of () or (config)"
    )
    global_batch_size: int = _run(
        64, "examples of one batch, over all replicas", unit="examples", minimum=1
    )
    epochs: int | None = _run(None, "length of the run; 1 without steps", unit="epochs", minimum=1)
    steps: int | None = _run(None, "length of the run, instead of epochs", unit="steps", minimum=1)
    seed: int = _run(0, "seed of weights, data order and noise", minimum=0, maximum=2**31 - 1)
    evaluation_fraction: float = _run(
        0.0, "share of examples held out for evaluation, drawn by the seed", minimum=0, maximum=0.9
    )

    micro_batches: int = _training(
        1,
        "split each replica's batch into so many micro-batches and accumulate gradients, to save"
        " memory",
        minimum=1,
    )
    virtual_replicas: int = _training(
        0,
        "fixed shards per batch, for bit-identical results on any number of replicas; 0: off",
        minimum=0,
    )
    class_weight: Mapping[int, float] = _training(
        {},
        "weights of classes in the loss, each class from 0 on once; other classes have 1",
        metavar="0:1,1:6.5",
        minimum=0,
        maximum=1e6,
    )
    evaluation_batch_size: int = _training(
        0,
        "examples that one replica evaluates at a time; 0: global_batch_size",
        unit="examples",
        minimum=0,
    )
    learning_rate: float = _training(
        1e-4, "step size of the optimizers", above=0, used_by=_OPTIMIZER
    )
    learning_rate_schedule: str = _training(
        "constant",
        "shape of the learning rate after the warm-up",
        choices=("constant", "cosine"),
        used_by=_OPTIMIZER,
    )
    warmup_steps: int = _training(
        0,
        "steps of a linear increase to learning_rate",
        unit="steps",
        minimum=0,
        used_by=_OPTIMIZER,
    )
    early_stopping: str = _training(
        "", "stop when this epoch metric, as val_loss, no longer improves"
    )
    patience: int = _training(
        3,
        "epochs without improvement before early_stopping",
        unit="epochs",
        minimum=1,
        used_with="early_stopping",
    )
    max_minutes: float = _training(
        0.0,
        "save, export and end after this training time, restarts included; 0: never",
        unit="minutes",
        minimum=0,
    )
    initial_checkpoint: str = _training(
        "", "start from the weights of another run's checkpoint (or job directory)", reads=True
    )
    initial_model: str = _training(
        "", "start from the weights of a saved model, a model.keras", reads=True
    )

    data_memory_mib: int = _data(
        4096,
        "prepared data larger than this are read row by row, in constant memory",
        unit="MiB",
        minimum=0,
    )
    cache_dir: str = _data("", "folder for the cache of gs:// data; empty: ~/.cache/vertex-trainer")

    strategy: str = _devices(
        "auto",
        "strategy; auto: by devices and TF_CONFIG",
        choices=("auto", "one_device", "mirrored", "multi_worker"),
    )
    worker_timeout_seconds: int = _devices(
        600,
        "how long to wait for a worker that is late, silent or behind the others",
        unit="seconds",
        minimum=1,
    )
    replicas: int = _devices(
        0,
        "number of local devices; 0: all GPUs; on a CPU: logical devices",
        unit="devices",
        minimum=0,
        maximum=64,
    )
    expect_devices: int = _devices(
        0, "stop when fewer accelerators than this are visible", unit="devices", minimum=0
    )
    precision: str = _devices(
        "float32",
        "arithmetic of the layers",
        choices=("float32", "mixed_bfloat16", "mixed_float16", "float64"),
    )
    tf32: bool = _devices(
        True,
        "multiply float32 as TensorFloat-32, with 10 bits after the point, on GPUs that can (A100,"
        " L4, H100)",
    )
    jit_compile: str = _devices(
        "auto",
        "compile the step with XLA; auto: in a long run on GPUs, or on a CPU without oneDNN",
        choices=("auto", "true", "false"),
    )
    deterministic: bool = _devices(False, "bit-identical results on GPUs too, as on CPUs; slower")
    sync_batch_norm: bool = _devices(True, "batch normalization over the rows of all replicas")
    allow_replica_dependence: bool = _devices(
        False,
        "train even if the comparison before training finds other numbers on one replica than"
        " on two",
    )
    steps_per_loop: int = _devices(
        0,
        "maximum number of steps per tf.function call; 0: as many as take about 3 seconds",
        unit="steps",
        minimum=0,
    )

    checkpoint_every_steps: int = _output(
        500,
        "save a checkpoint this often, and at the end; 0: only at the end",
        unit="steps",
        minimum=0,
    )
    checkpoint_every_minutes: float = _output(
        0.0, "save a checkpoint this often too; 0: by steps only", unit="minutes", minimum=0
    )
    keep_checkpoints: int = _output(3, "newest checkpoints to keep, and the best one", minimum=1)
    save_optimizer: bool = _output(
        False, "save the optimizer's state in model.keras, so that fit can continue"
    )
    best_metric: str = _output(
        "",
        "metric whose best checkpoint is kept; none: early_stopping's, else val_accuracy, fid or"
        " val_loss",
    )
    report_every_steps: int = _output(
        50, "report losses and speed this often, and at the end", unit="steps", minimum=1
    )
    tensorboard: bool = _output(True, "write TensorBoard event files")
    profile_steps: str = _output("", "steps to profile for TensorBoard, as 100..110, at most 100")
    track: tuple[str, ...] = _output(
        (),
        "trackers that show the run, with commas: mlflow:http://HOST:PORT#EXPERIMENT,"
        " wandb:PROJECT, vertex:EXPERIMENT",
        metavar="TRACKER,…",
    )
    tuning_metric: str = _output("", "metric reported to Vertex hyperparameter tuning")

    image_size: int = _images(
        32,
        "height and width of the images",
        unit="pixels",
        minimum=1,
        maximum=4096,
        used_by=_PIXELS,
    )
    channels: int = _images(
        1, "channels of the images, grey or in colour", choices=(1, 3), used_by=_PIXELS
    )
    augment: tuple[str, ...] = _images(
        (), "random changes of the training images, several with a comma", choices=AUGMENTATIONS
    )
    skip_bad_images: bool = _images(
        False,
        "leave out image files that cannot be decoded",
        used_by="the data are not read from image files",
    )
    sample_every_steps: int = _images(
        250,
        "write a sample grid this often, and at the end; 0: only at the end",
        unit="steps",
        minimum=0,
        used_by="the model generates no images",
    )
    fid_every_steps: int = _images(
        0,
        "compute a GAN's FID and KID this often, and at the end; 0: never",
        unit="steps",
        minimum=0,
    )
    fid_samples: int = _images(
        10_000, "images to compare, real and generated", minimum=2, used_with="fid_every_steps"
    )
    fid_features: str = _images(
        "inception",
        "network of FID's features: inception, its weights in a .h5 file, or a classifier's .keras"
        " file",
        reads=True,
        used_with="fid_every_steps",
    )

    def __eq__(self, other: object) -> bool:
        """Returns whether all settings are the same, those of the model, too."""
        return isinstance(other, TrainConfig) and vars(self) == vars(other)

    def check_model(self) -> None:
        """Raises UserError if the settings do not fit a built-in model, whose config class
        overrides this."""

    @property
    def inputs(self) -> dict[str, str]:
        """Returns the settings that may name a file or folder to read, and their values."""
        names = [field.name for field in fields(self) if field.metadata["reads"]]
        return {"data": split_kind(self.data)[1], **{name: getattr(self, name) for name in names}}

    @property
    def evaluation_batch(self) -> int:
        """Returns the number of examples that one replica evaluates at a time."""
        return self.evaluation_batch_size or self.global_batch_size

    @property
    def profiled(self) -> range:
        """Returns the numbers of the steps in `profile_steps`, the first step of a run being 1;
        empty without any.

        Raises UserError if it is not of the form 100..110, or too long.
        """
        if not self.profile_steps:
            return range(0)
        match = re.fullmatch(r"(\d{1,9})\.\.(\d{1,9})", self.profile_steps)
        steps = range(int(match[1]), int(match[2]) + 1) if match else range(0)
        if steps.start < 2 or not 1 <= len(steps) <= 100:
            raise UserError(
                f"profile_steps={self.profile_steps}: write it as 100..110 (first step..last step):"
                " 1 to 100 steps, from step 2 on (the first builds the graph)"
            )
        return steps

    def rows_per_replica(self, replicas: int) -> int:
        """Returns how many rows of a global batch each of `replicas` gets.

        Raises UserError if it does not divide.

        A replica's rows must also divide into micro-batches.
        """
        # What the batch must divide by: virtual replicas, or replicas and micro-batches.
        count = self.virtual_replicas
        batch = self.global_batch_size
        if count:
            flag = f"virtual_replicas={count}"
            if count < 2 or count & (count - 1):
                raise UserError(f"{flag}: use a power of 2 from 2 on, as sums are added in pairs")
            if count % replicas:
                raise UserError(
                    f"{flag} does not divide over {replicas} replicas: use 1, 2, 4 … {count} of"
                    " them"
                )
            if self.micro_batches > 1:
                raise UserError(
                    f"{flag} and micro_batches={self.micro_batches} contradict each other: each"
                    " virtual replica is a micro-batch: drop --micro_batches, or use"
                    f" --virtual_replicas={2 * count}"
                )
            factors = {flag: count}
        else:
            factors = {
                f"{replicas} replicas": replicas,
                f"micro_batches={self.micro_batches}": self.micro_batches,
            }
        # The nearest batches that divide.
        unit = math.prod(factors.values())
        if left_over := batch % unit:
            over = " x ".join(words for words, factor in factors.items() if factor > 1)
            lower = batch - left_over
            near = f"{lower} or {lower + unit}" if lower else f"{unit}"
            raise UserError(f"global_batch_size={batch} does not divide over {over}: take {near}")
        return batch // replicas

    def micro_batches_on(self, replicas: int) -> int:
        """Returns into how many micro-batches each of so many replicas divides its rows."""
        if self.virtual_replicas:
            return max(1, self.virtual_replicas // replicas)
        return self.micro_batches


# Settings that most runs need, which --help shows.
USUAL = (
    "recipe",
    "job_dir",
    "model",
    "data",
    "epochs",
    "steps",
    "global_batch_size",
    "learning_rate",
    "evaluation_fraction",
    "replicas",
)

# Settings that a resumed run may change.
MAY_CHANGE = frozenset(
    {
        "recipe",
        "job_dir",
        "callbacks",
        "epochs",
        "steps",
        "strategy",
        "replicas",
        "expect_devices",
        "steps_per_loop",
        "jit_compile",
        "checkpoint_every_steps",
        "keep_checkpoints",
        "report_every_steps",
        "sample_every_steps",
        "tensorboard",
        "tuning_metric",
        "fid_every_steps",
        "fid_samples",
        "fid_features",
        "patience",
        "early_stopping",
        "data_memory_mib",
        "worker_timeout_seconds",
        "checkpoint_every_minutes",
        "best_metric",
        "deterministic",
        "max_minutes",
        "initial_checkpoint",
        "initial_model",
        "cache_dir",
        "track",
        "evaluation_batch_size",
        "profile_steps",
        "micro_batches",
        "allow_replica_dependence",
        "save_optimizer",
    }
)


def split_kind(data: str) -> tuple[str, str]:
    """Returns the two parts of `kind:path`; the kind is empty if none is given."""
    kind, colon, rest = data.partition(":")
    return (kind, rest) if colon and kind in DATA_KINDS else ("", data)


def contradiction(config: TrainConfig, setting: str, other: str, advice: str) -> UserError:
    """Returns the error for two settings whose values exclude each other."""
    both = f"{setting}={getattr(config, setting)} and {other}={getattr(config, other)}"
    return UserError(f"{both} contradict each other: {advice}")
