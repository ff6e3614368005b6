"""Defines the settings of a run, with meaning, unit and limits; those of a model alone stand beside it.

Imports no TensorFlow.
"""

import bisect
import dataclasses
import re
from functools import partial

from trainer.base.errors import UserError
from trainer.base.settings.fields import setting

# Names of built-in functions; a user's own `package.module:function` is used as it is.
MODELS = {name: f"trainer.models.{name}:build" for name in ("mlp", "cnn", "efficientnet", "dcgan", "wgan_gp", "r3gan")}
DATA_SOURCES = {
    "digits": "trainer.data.digits:load",
    "mnist": "trainer.data.keras_datasets:load",
    "fashion_mnist": "trainer.data.keras_datasets:load",
    "cifar10": "trainer.data.keras_datasets:load",
}

# Prefixes of a path, as in folder:photos, for data whose kind is not recognised.
DATA_KINDS = ("idx", "npz", "tfrecord", "shards", "folder")

# Names for `augment`, one or several, separated by commas.
AUGMENTATIONS = ("flip", "crop")


# One function a group of --help.
_run, _model, _training, _data, _devices, _output = (
    partial(setting, group=group) for group in ("run", "model", "training", "data", "devices", "output")
)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Holds every setting of a run. Field names are the flags, the keys of a recipe and the keys of run.json.

    A resolved one is of a subclass, with the settings of its model, data and callbacks: `OwnSettings`.
    """

    recipe: str = _run("", "name or path of the recipe")
    job_dir: str = _run("", "folder or gs:// address that the run writes to, and resumes from")
    callbacks: str = _run("", "package.module:function that returns a list of Keras callbacks")

    model: str = _model("wgan_gp", "a model's name, or your own package.module:function")
    image_size: int = _model(32, "height and width of the images", unit="pixels", minimum=1, maximum=4096)
    channels: int = _model(1, "1 (grey) or 3 (colour)", minimum=1, maximum=3)

    data: str = _data("digits", "a source's name, a path, kind:path, or your own package.module:function")
    evaluation_fraction: float = _data(
        0.0, "share of the examples held out for evaluation, if the source has no such part", minimum=0, maximum=0.9
    )
    augment: str = _data(
        "", f"random changes of the training images: {' or '.join(AUGMENTATIONS)}, or both, with a comma"
    )
    skip_bad_images: bool = _data(False, "leave out image files that cannot be decoded")
    data_memory_mib: int = _data(
        4096, "prepared shards larger than this are read row by row, in constant memory", unit="MiB", minimum=0
    )
    cache_dir: str = _data("", "folder for the cache of gs:// data; empty: ~/.cache/vertex-trainer")
    data_changed: str = _data(
        "refuse",
        "when the data differ from those at the start of the run that is resumed",
        choices=("refuse", "accept"),
    )

    global_batch_size: int = _training(64, "examples of one batch, over all replicas", unit="examples", minimum=1)
    micro_batches: int = _training(
        1, "passes in which each update takes a replica's rows, to need less memory; gradients are summed",
        unit="passes", minimum=1,
    )  # fmt: skip
    label_smoothing: float = _training(
        0.0, "share of each label that a classifier's loss gives to all classes alike", minimum=0, maximum=0.9
    )
    mixup: float = _training(
        0.0, "alpha of the Beta distribution by which a classifier's images and labels are mixed in pairs; 0: none",
        minimum=0, maximum=100,
    )  # fmt: skip
    class_weight: str = _training("", "weights of classes in the loss, as 0:1,1:6.5; other classes have 1")
    evaluation_batch_size: int = _training(
        0, "examples that one replica evaluates at a time; 0: global_batch_size", unit="examples", minimum=0
    )
    epochs: int | None = _training(None, "length of the run; 1 without steps", unit="epochs", minimum=1)
    steps: int | None = _training(None, "length of the run, instead of epochs", unit="steps", minimum=1)
    learning_rate: float = _training(1e-4, "step size of the optimizers", above=0)
    learning_rate_schedule: str = _training(
        "constant", "shape of the learning rate after the warm-up", choices=("constant", "cosine")
    )
    warmup_steps: int = _training(0, "steps of a linear increase to learning_rate", unit="steps", minimum=0)
    early_stopping: str = _training("", "stop when this metric of an epoch, as val_loss, no longer improves")
    patience: int = _training(3, "epochs without improvement before early_stopping", unit="epochs", minimum=1)
    max_minutes: float = _training(
        0.0,
        "end the run, saved and exported, after this time over all restarts; 0: no limit",
        unit="minutes",
        minimum=0,
    )
    on_nan: str = _training(
        "stop",
        "when a loss is NaN: stop, or rollback to the last checkpoint with half the learning rate, at most twice",
        choices=("stop", "rollback"),
    )
    initial_checkpoint: str = _model(
        "", "start from the weights of another run's checkpoint (or job directory)", reads=True
    )
    initial_model: str = _model("", "start from the weights of a saved template model, a model.keras", reads=True)
    seed: int = _training(0, "seed of weights, data order and noise", minimum=0, maximum=2**31 - 1)

    strategy: str = _devices(
        "auto",
        "tf.distribute strategy; auto chooses it by the devices and TF_CONFIG",
        choices=("auto", "one_device", "mirrored", "multi_worker"),
    )
    communication: str = _devices(
        "auto",
        "how several workers sum gradients; auto and nccl: by NCCL on GPUs, else by ring",
        choices=("auto", "ring", "nccl"),
    )
    worker_timeout_seconds: int = _devices(
        600, "how long workers wait for a worker that is late, silent or behind", unit="seconds", minimum=1
    )
    replicas: int = _devices(
        0,
        "local devices to use, 0 for all GPUs; on a CPU this many logical devices are made",
        unit="devices",
        minimum=0,
        maximum=64,
    )
    expect_devices: int = _devices(0, "stop when fewer accelerators than this are visible", unit="devices", minimum=0)
    precision: str = _devices(
        "float32", "arithmetic of the layers", choices=("float32", "mixed_bfloat16", "mixed_float16", "float64")
    )
    tf32: bool = _devices(
        True, "multiply float32 as TensorFloat-32, with 10 bits after the point, on GPUs that can (A100, L4, H100)"
    )
    jit_compile: str = _devices(
        "auto",
        "compile the whole step with XLA, on one machine; auto: on CPUs, if it proves faster before the first step",
        choices=("auto", "true", "false"),
    )
    deterministic: bool = _devices(False, "bit-identical results on GPUs too, as on CPUs; slower")
    sync_batch_norm: bool = _devices(True, "batch normalization over the rows of all replicas")
    allow_replica_dependence: bool = _devices(
        False, "train although the comparison before training finds other numbers on one replica than on two"
    )
    steps_per_loop: int = _devices(
        0, "most steps in one call to the device; 0: as many as take about 3 seconds", unit="steps", minimum=0
    )

    checkpoint_every_steps: int = _output(
        500, "save the state this often, and at the end; 0: only at the end", unit="steps", minimum=0
    )
    checkpoint_every_minutes: float = _output(
        0.0, "save the state this often too; 0: by steps only", unit="minutes", minimum=0
    )
    keep_checkpoints: int | None = _output(
        3, "newest checkpoints to keep, and the best one; all: every one", minimum=1, none="all"
    )
    best_metric: str = _output("", "metric whose best checkpoint is kept; none: val_accuracy, else fid, else val_loss")
    report_every_steps: int = _output(50, "report losses and speed this often, and at the end", unit="steps", minimum=1)
    sample_every_steps: int = _output(
        250, "write a sample grid this often, and at the end; 0: only at the end", unit="steps", minimum=0
    )
    fid_every_steps: int = _output(
        0, "compute a GAN's FID and KID this often, and at the end; 0: never", unit="steps", minimum=0
    )
    fid_samples: int = _output(10_000, "images to compare, real and generated", minimum=2)
    fid_features: str = _output(
        "inception", "network of FID's features: inception, or the model.keras of a saved classifier", reads=True
    )
    fid_weights: str = _output("imagenet", "weights of inception: imagenet, or a weights file", reads=True)
    tensorboard: bool = _output(True, "write TensorBoard event files")
    profile_steps: str = _output(
        "", "steps to profile, as 100..110, at most 100: for TensorBoard, and where their time goes, in words"
    )
    track: str = _output(
        "",
        "trackers that show the run, with commas: mlflow:http://HOST:PORT#EXPERIMENT, wandb:PROJECT, vertex:EXPERIMENT",
    )
    tuning_metric: str = _output("", "metric reported to Vertex hyperparameter tuning")

    @property
    def inputs(self) -> dict[str, str]:
        """Returns the settings that may name a file or folder to read, and their values."""
        others = [field.name for field in dataclasses.fields(self) if field.metadata["reads"]]
        return {"data": split_kind(self.data)[1], **{name: getattr(self, name) for name in others}}

    @property
    def augmentations(self) -> tuple[str, ...]:
        """Returns the names in `augment`."""
        return names_in(self.augment)

    @property
    def evaluation_batch(self) -> int:
        """Returns the number of examples that one replica evaluates at a time."""
        return self.evaluation_batch_size or self.global_batch_size

    @property
    def class_weights(self) -> dict[int, float]:
        """Returns the weight of each class in `class_weight`. Raises UserError if it is not of the form 0:1,1:6.5."""
        pairs = [pair.split(":") for pair in self.class_weight.split(",") if pair.strip()]
        try:
            weights = {int(number): float(weight) for number, weight in pairs}
        except ValueError:
            raise UserError(f"class_weight={self.class_weight}: write it as 0:1,1:6.5 (class:weight)") from None
        if len(weights) < len(pairs) or any(number < 0 or not 0 <= weight < 1e6 for number, weight in weights.items()):
            raise UserError(f"class_weight={self.class_weight}: each class once, from 0, and weights from 0 to 1e6")
        return weights

    @property
    def profiled(self) -> range:
        """Returns the numbers of the steps in `profile_steps`, the first step of a run being 1; empty without any.

        Raises UserError if it is not of the form 100..110.
        """
        if not self.profile_steps:
            return range(0)
        found = re.fullmatch(r"(\d{1,9})\.\.(\d{1,9})", self.profile_steps)
        if not found:
            raise UserError(f"profile_steps={self.profile_steps}: write it as 100..110 (first step..last step)")
        steps = range(int(found[1]), int(found[2]) + 1)
        if steps.start < 2 or not 1 <= len(steps) <= 100:
            raise UserError(
                f"profile_steps={self.profile_steps}: take 1 to 100 steps, from step 2 on (the first builds the graph)"
            )
        return steps

    def rows_per_replica(self, replicas: int) -> int:
        """Returns the rows of a global batch for one of `replicas`. Raises UserError if the batch does not divide.

        Each of `micro_batches` must get as many rows too, and with mixup a replica an even number.
        """
        rows, left_over = divmod(self.global_batch_size, replicas)
        if left_over:
            lower = self.global_batch_size - left_over
            near = f"{lower} or {lower + replicas}" if lower else f"{replicas}"
            raise UserError(
                f"global_batch_size={self.global_batch_size} does not divide over {replicas} replicas: take {near}"
            )
        if self.mixup and rows % 2:
            pair = 2 * replicas
            lower = self.global_batch_size // pair * pair
            near = f"{lower} or {lower + pair}" if lower else f"{pair}"
            raise UserError(
                f"mixup={self.mixup} mixes rows in pairs, and each replica has {rows} of global_batch_size="
                f"{self.global_batch_size}, an odd number: take {near}"
            )
        if rows % self.micro_batches:
            divisors = [number for number in range(1, rows + 1) if rows % number == 0]
            at = bisect.bisect(divisors, self.micro_batches)
            raise UserError(
                f"micro_batches={self.micro_batches} does not divide the {rows} rows of a replica: take "
                f"{' or '.join(map(str, divisors[at - 1 : at + 1]))}"
            )
        return rows


# Settings that a resumed run may change.
MAY_CHANGE = frozenset({
    "recipe", "job_dir", "callbacks", "epochs", "steps", "strategy", "replicas", "expect_devices", "steps_per_loop",
    "jit_compile", "checkpoint_every_steps", "keep_checkpoints", "report_every_steps", "sample_every_steps",
    "tensorboard", "tuning_metric", "fid_every_steps", "fid_samples", "fid_features", "fid_weights", "patience",
    "early_stopping", "data_memory_mib", "communication", "worker_timeout_seconds", "checkpoint_every_minutes",
    "best_metric", "deterministic", "max_minutes", "on_nan", "initial_checkpoint", "initial_model", "cache_dir",
    "data_changed", "track", "evaluation_batch_size", "profile_steps", "micro_batches", "allow_replica_dependence",
})  # fmt: skip


def names_in(text: str) -> tuple[str, ...]:
    """Returns the names in a text, separated by commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def split_kind(data: str) -> tuple[str, str]:
    """Returns the two parts of `kind:path`; the kind is empty if none is given."""
    kind, colon, rest = data.partition(":")
    return (kind, rest) if colon and kind in DATA_KINDS else ("", data)
