"""What a run is: a recipe and flags, resolved to one frozen TrainConfig. Imports no TensorFlow.

A flag wins over the recipe, the recipe over the default. `resolve` is the entry; `deploy` asks the same function
at the desk, so that nothing is sent which the trainer would refuse.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from trainer.errors import UnknownData, UserError
from trainer.flags import parse_flags, read_yaml
from trainer.measures import check_measures
from trainer.settings import coerce, coerce_all, nearest, setting

RECIPES = Path(__file__).parent / "recipes"

# Names that stand for a dotted path; a user's own `package.module:function` is taken as it is.
MODELS = {name: f"trainer.models.{name}:build" for name in ("mlp", "cnn", "efficientnet", "dcgan", "wgan_gp")}
DATA_SOURCES = {
    "digits": "trainer.data.digits:load",
    "mnist": "trainer.data.keras_datasets:load",
    "fashion_mnist": "trainer.data.keras_datasets:load",
    "cifar10": "trainer.data.keras_datasets:load",
}

# What may stand before a path, as in folder:photos, where its kind is not seen from what lies there.
DATA_KINDS = ("idx", "npz", "tfrecord", "shards", "folder")

# What `augment` may name, one or several, separated by commas.
AUGMENTATIONS = ("flip", "crop")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Every setting of a run. Field names are the flags, the keys of a recipe and the keys of run.json."""

    recipe: str = setting("", "name or path of the recipe", group="run")
    job_dir: str = setting("", "folder or gs:// address that the run writes to, and resumes from", group="run")
    callbacks: str = setting("", "package.module:function that returns a list of Keras callbacks", group="run")

    model: str = setting("wgan_gp", "a model's name, or package.module:function of your own", group="model")
    image_size: int = setting(
        32, "height and width of the images", unit="pixels", minimum=1, maximum=4096, group="model"
    )
    channels: int = setting(1, "1 (grey) or 3 (colour)", minimum=1, maximum=3, group="model")
    width: int = setting(32, "filters of the widest-image layer; deeper ones double it", minimum=1, group="model")
    latent_dim: int = setting(128, "length of a generator's noise vector", minimum=1, group="model")

    variant: str = setting(
        "B2", "which EfficientNet", choices=tuple(f"B{number}" for number in range(8)), group="model"
    )
    weights: str = setting("imagenet", "EfficientNet's first weights: imagenet, none, or a weights file", group="model")
    fine_tune_from: str = setting(
        "", "EfficientNet's first block that learns too, as block6a; none: only the head learns", group="model"
    )
    fine_tune_after_steps: int = setting(
        0, "steps in which only EfficientNet's head learns", unit="steps", minimum=0, group="training"
    )
    fine_tune_learning_rate: float = setting(
        1e-5, "learning_rate from fine_tune_after_steps on", above=0, group="training"
    )

    data: str = setting(
        "digits", "a source's name, a path, kind:path, or package.module:function of your own", group="data"
    )
    evaluation_fraction: float = setting(
        0.0,
        "share of the examples held back for evaluation, where the source has no such part",
        minimum=0,
        maximum=0.9,
        group="data",
    )
    augment: str = setting(
        "", f"random changes of the training images: {' or '.join(AUGMENTATIONS)}, or both, with a comma", group="data"
    )
    skip_bad_images: bool = setting(False, "leave out image files that cannot be decoded", group="data")
    data_memory_mib: int = setting(
        4096,
        "prepared shards larger than this are read row by row, with flat memory",
        unit="MiB",
        minimum=0,
        group="data",
    )
    cache_dir: str = setting(
        "", "folder that keeps what was read from gs://; without it ~/.cache/vertex-trainer", group="data"
    )
    stream: bool = setting(
        False,
        "read TFRecord files or prepared shards at gs:// that are larger than the disk, a few at a time",
        group="data",
    )

    global_batch_size: int = setting(
        64, "examples of one batch, over all replicas", unit="examples", minimum=1, group="training"
    )
    epochs: int | None = setting(None, "length of the run; 1 without steps", unit="epochs", minimum=1, group="training")
    steps: int | None = setting(None, "length of the run, instead of epochs", unit="steps", minimum=1, group="training")
    learning_rate: float = setting(1e-4, "step size of the optimizers", above=0, group="training")
    learning_rate_schedule: str = setting(
        "constant", "how the learning rate goes on after the warm-up", choices=("constant", "cosine"), group="training"
    )
    warmup_steps: int = setting(0, "steps of linear rise to learning_rate", unit="steps", minimum=0, group="training")
    dropout: float = setting(0.0, "share of hidden units dropped", minimum=0, maximum=0.95, group="model")
    critic_steps: int = setting(5, "critic updates before each generator update", minimum=1, group="training")
    gradient_penalty_weight: float = setting(
        10.0, "weight of the critic's gradient penalty", minimum=0, group="training"
    )
    ema_decay: float = setting(
        0.999,
        "decay a step of the generator's averaged weights; 0: no averaging",
        minimum=0,
        maximum=0.999999,
        group="training",
    )
    early_stopping: str = setting("", "stop when this value of an epoch, as val_loss, gets no better", group="training")
    patience: int = setting(
        3, "epochs without improvement before early_stopping", unit="epochs", minimum=1, group="training"
    )
    max_minutes: float = setting(
        0.0,
        "end the run, saved and exported, after this time over all restarts; 0: no limit",
        unit="minutes",
        minimum=0,
        group="training",
    )
    on_nan: str = setting(
        "stop",
        "when a loss is NaN: stop, or rollback to the last checkpoint with half the learning rate, at most twice",
        choices=("stop", "rollback"),
        group="training",
    )
    initial_checkpoint: str = setting(
        "", "begin with the weights of another run's checkpoint (or job directory)", group="model"
    )
    initial_model: str = setting("", "begin with the weights of a saved template model, a model.keras", group="model")
    seed: int = setting(0, "fixes weights, data order and noise", minimum=0, maximum=2**31 - 1, group="training")

    strategy: str = setting(
        "auto",
        "how replicas work together; auto goes by the devices and TF_CONFIG",
        choices=("auto", "one_device", "mirrored", "multi_worker"),
        group="devices",
    )
    communication: str = setting(
        "auto", "how several workers sum gradients", choices=("auto", "ring", "nccl"), group="devices"
    )
    worker_timeout_seconds: int = setting(
        600, "how long workers wait for one that is late", unit="seconds", minimum=1, group="devices"
    )
    replicas: int = setting(
        0,
        "local devices to use, 0 for all GPUs; on a CPU this many logical devices are made",
        unit="devices",
        minimum=0,
        maximum=64,
        group="devices",
    )
    expect_devices: int = setting(
        0, "stop when fewer accelerators than this are visible", unit="devices", minimum=0, group="devices"
    )
    precision: str = setting(
        "float32",
        "arithmetic of the layers",
        choices=("float32", "mixed_bfloat16", "mixed_float16", "float64"),
        group="devices",
    )
    jit_compile: bool = setting(
        False, "compile the gradients of wgan_gp and dcgan with XLA; nothing of the other models", group="devices"
    )
    deterministic: bool = setting(
        False, "the same numbers bit for bit on GPUs too, as they are on CPUs; slower", group="devices"
    )
    sync_batch_norm: bool = setting(True, "batch norm over all replicas' rows", group="devices")
    steps_per_loop: int = setting(
        0,
        "most steps in one call to the device; 0 lets it grow to about 3 seconds",
        unit="steps",
        minimum=0,
        group="devices",
    )

    checkpoint_every_steps: int = setting(
        500, "save the state this often, and at the end; 0: only at the end", unit="steps", minimum=0, group="output"
    )
    checkpoint_every_minutes: float = setting(
        0.0, "save the state this often too; 0: by steps only", unit="minutes", minimum=0, group="output"
    )
    keep_checkpoints: int = setting(3, "newest checkpoints to keep, and the best one", minimum=1, group="output")
    best_metric: str = setting(
        "", "value whose best checkpoint is kept; none: val_accuracy, or fid where it is computed", group="output"
    )
    report_every_steps: int = setting(
        50, "report losses and speed this often, and at the end", unit="steps", minimum=1, group="output"
    )
    sample_every_steps: int = setting(
        250,
        "write a sample grid this often, and at the end; 0: only at the end",
        unit="steps",
        minimum=0,
        group="output",
    )
    fid_every_steps: int = setting(
        0, "compute a GAN's FID and KID this often, and at the end; 0: never", unit="steps", minimum=0, group="output"
    )
    fid_samples: int = setting(10_000, "images to compare, real and generated", minimum=2, group="output")
    fid_features: str = setting(
        "inception", "what FID looks at: inception, or the model.keras of a saved classifier", group="output"
    )
    fid_weights: str = setting("imagenet", "weights of inception: imagenet, or a weights file", group="output")
    tensorboard: bool = setting(True, "write TensorBoard event files", group="output")
    tuning_metric: str = setting("", "metric reported to Vertex hyperparameter tuning", group="output")

    @property
    def inputs(self) -> dict[str, str]:
        """The settings that may name a file or folder to read, and what they name."""
        others = ("weights", "fid_features", "fid_weights", "initial_checkpoint", "initial_model")
        return {"data": said_kind(self.data)[1], **{name: getattr(self, name) for name in others}}

    @property
    def augmentations(self) -> tuple[str, ...]:
        """The names in `augment`."""
        return tuple(name.strip() for name in self.augment.split(",") if name.strip())

    def rows_per_replica(self, replicas: int) -> int:
        """Rows of each global batch that one of `replicas` works on; UserError where the batch does not divide."""
        rows, left_over = divmod(self.global_batch_size, replicas)
        if left_over:
            lower = self.global_batch_size - left_over
            near = f"{lower} or {lower + replicas}" if lower else f"{replicas}"
            raise UserError(
                f"global_batch_size={self.global_batch_size} does not divide over {replicas} replicas: take {near}"
            )
        return rows


# Settings that a resumed run may change without becoming another run.
MAY_CHANGE = frozenset({
    "recipe", "job_dir", "callbacks", "epochs", "steps", "strategy", "replicas", "expect_devices", "steps_per_loop",
    "jit_compile", "checkpoint_every_steps", "keep_checkpoints", "report_every_steps", "sample_every_steps",
    "tensorboard", "tuning_metric", "fid_every_steps", "fid_samples", "fid_features", "fid_weights", "patience",
    "early_stopping", "data_memory_mib", "communication", "worker_timeout_seconds", "checkpoint_every_minutes",
    "best_metric", "deterministic", "max_minutes", "on_nan", "initial_checkpoint", "initial_model", "cache_dir",
})  # fmt: skip


# EfficientNet without weights, over whatever a recipe says of fine-tuning.
FROM_SCRATCH = "--weights=none --fine_tune_from= --fine_tune_after_steps=0"


def _efficientnet(config: TrainConfig) -> None:
    if config.channels != 3:
        raise UserError(f"channels={config.channels}: efficientnet takes colour images: say --channels=3")
    if config.image_size < 32:
        raise UserError(f"image_size={config.image_size}: efficientnet needs at least 32 pixels")
    if config.fine_tune_after_steps and not config.fine_tune_from:
        raise UserError(
            f"fine_tune_after_steps={config.fine_tune_after_steps} without fine_tune_from: name the first block that "
            f"learns then, for example --fine_tune_from=block6a, or train all from scratch: {FROM_SCRATCH}"
        )
    if config.weights == "none" and config.fine_tune_from:
        raise UserError(
            f"weights=none and fine_tune_from={config.fine_tune_from} contradict each other: without weights all "
            f"learns: say {FROM_SCRATCH}"
        )


def _cnn(config: TrainConfig) -> None:
    if config.image_size < 20:
        raise UserError(f"image_size={config.image_size}: cnn needs at least 20 pixels")


def _gan_images(config: TrainConfig) -> None:
    size = config.image_size
    if size % 8 or not 16 <= size <= 256:
        near = sorted({str(min(max(near, 16), 256)) for near in (size // 8 * 8, size // 8 * 8 + 8)})
        raise UserError(
            f"image_size={size}: {config.model} needs a multiple of 8 from 16 to 256: take {' or '.join(near)}"
        )


# What a named model asks of the settings, checked before TensorFlow is loaded.
MODEL_RULES: Mapping[str, Callable[[TrainConfig], None]] = {
    "wgan_gp": _gan_images,
    "dcgan": _gan_images,
    "cnn": _cnn,
    "efficientnet": _efficientnet,
}


@dataclasses.dataclass(frozen=True)
class Request:
    """One command line, understood: the settings, and whether only to print them."""

    config: TrainConfig
    print_config: bool = setting(False, "print the resolved settings and stop", group="run")


_PRINT_CONFIG = dataclasses.fields(Request)[1]

_EPILOG = """\
Start with:
  python -m trainer.task --recipe=wgan_gp_digits --job_dir=runs/demo      data that come along; the same again goes on
  python -m trainer.task --recipe=cnn_mnist --data=FOLDER --job_dir=runs/cnn
  python -m trainer.task --recipe=cnn_mnist --print_config                what would run
  python -m deploy --help                                                 Vertex AI, and which tier is worth its money

In the job directory: model/ (.keras, .h5, SavedModel), samples/, stats.jsonl, run.json, result.json, checkpoints/,
logs/.

Exit codes: 0 done; 2 you must change something; 75 interrupted, state saved, run the same command again; 1 a fault of
ours or of the platform."""


def _description() -> str:
    return f"""\
Trains a Keras model on one device, on several GPUs or on several machines, with the same numbers everywhere.

A recipe is a file of settings; a flag wins over it. Recipes: a path, or
  {", ".join(recipe_names()[:5])},
  {", ".join(recipe_names()[5:])}
Data: {", ".join(DATA_SOURCES)}, or a path: {", ".join(DATA_KINDS)}."""


def said_kind(data: str) -> tuple[str, str]:
    """`kind:path` in its two parts; an empty kind where none is said."""
    kind, colon, rest = data.partition(":")
    return (kind, rest) if colon and kind in DATA_KINDS else ("", data)


def resolve(arguments: Sequence[str]) -> Request:
    """Flags over recipe over defaults; UserError where something does not fit, SystemExit(0) for --help."""
    flags = parse_flags([*dataclasses.fields(TrainConfig), _PRINT_CONFIG], arguments, _description(), _EPILOG)
    print_config = coerce(_PRINT_CONFIG, flags.pop("print_config", "false"))
    recipe = flags.get("recipe", "")
    from_recipe = _read_recipe(recipe) if recipe else {}
    from_flags = coerce_all(TrainConfig, flags, "flags")
    _one_length(from_recipe, f"recipe={recipe}")
    _one_length(from_flags, "flags")
    if from_flags.keys() & {"steps", "epochs"}:
        from_recipe = {key: value for key, value in from_recipe.items() if key not in ("steps", "epochs")}
    config = TrainConfig(**{**from_recipe, **from_flags})
    if config.steps is None and config.epochs is None:
        config = dataclasses.replace(config, epochs=1)
    check(config)
    return Request(config, print_config)


def check(config: TrainConfig) -> None:
    """The rules between settings and those of the named model; UserError where one is broken."""
    if config.channels == 2:
        raise UserError("channels=2: images have 1 channel (grey) or 3 (colour)")
    _known_name("model", config.model, MODELS)
    if not config.data:
        raise UserError(
            "data is missing: say --data=FOLDER (or gs://BUCKET/FOLDER) with images of yours, for a classifier in one "
            "folder a class, or --data=digits to try it without"
        )
    if not any(sign in config.data for sign in "/.\\") and not os.path.exists(config.data):
        _known_name("data", config.data, DATA_SOURCES)
    for name in config.augmentations:
        if name not in AUGMENTATIONS:
            raise UserError(
                f"augment={config.augment}: no such augmentation{nearest(name, AUGMENTATIONS)} "
                f"Known: {', '.join(AUGMENTATIONS)}"
            )
    if config.stream and (config.evaluation_fraction or config.skip_bad_images):
        raise UserError(
            "stream=true with evaluation_fraction or skip_bad_images: both need to see all images first: drop them, or "
            "prepare the data with them (python -m trainer.data.prepare)"
        )
    if config.strategy == "one_device" and config.replicas > 1:
        raise UserError(f"strategy=one_device and replicas={config.replicas} contradict each other: drop one of them")
    if config.initial_checkpoint and config.initial_model:
        raise UserError(
            f"initial_checkpoint={config.initial_checkpoint} and initial_model={config.initial_model} contradict each "
            "other: drop one of them"
        )
    if config.strategy == "one_device" and config.expect_devices > 1:
        raise UserError(
            f"strategy=one_device and expect_devices={config.expect_devices} contradict each other: drop one"
        )
    if 0 < config.replicas < config.expect_devices:
        raise UserError(
            f"replicas={config.replicas} and expect_devices={config.expect_devices} contradict each other: devices "
            "that are paid for would not be used"
        )
    if config.fine_tune_after_steps and config.model in MODELS and config.model != "efficientnet":
        raise UserError(
            f"fine_tune_after_steps={config.fine_tune_after_steps}: {config.model} has no layers that learn later, "
            "only efficientnet has: drop it, or say --fine_tune_after_steps=0 where a recipe sets it"
        )
    if config.replicas:
        config.rows_per_replica(config.replicas)
    if config.model in MODEL_RULES:
        MODEL_RULES[config.model](config)
    check_measures(config.model, config.early_stopping, config.best_metric, config.fid_every_steps)


def _known_name(kind: str, name: str, known: Mapping[str, str]) -> None:
    if ":" not in name and name not in known:
        path = "a path that is there, " if kind == "data" else ""
        text = (
            f"{kind}={name}: no such {kind}{nearest(name, known)} "
            f"Known: {', '.join(known)}, {path}or package.module:function of your own"
        )
        raise UnknownData(text, name) if kind == "data" else UserError(text)


def to_yaml(config: TrainConfig) -> str:
    """The settings as a recipe that gives the same run again."""
    settings = {
        key: value for key, value in dataclasses.asdict(config).items() if value is not None and key != "recipe"
    }
    return yaml.safe_dump(settings, sort_keys=False)


def recipe_names() -> list[str]:
    """Names of the recipes that come with the package."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def _read_recipe(name: str) -> dict[str, Any]:
    path = Path(name) if name.endswith((".yaml", ".yml")) or "/" in name else RECIPES / f"{name}.yaml"
    try:
        content = read_yaml(path, f"recipe={name}")
        if "recipe" in content:
            raise UserError(f"recipe={name}: a recipe cannot name another (recipe: {content['recipe']})")
        return coerce_all(TrainConfig, content, f"recipe={name}")
    except FileNotFoundError:
        known = recipe_names()
        raise UserError(
            f"recipe={name}: no such recipe{nearest(name, known)} Known: {', '.join(known)}, or a .yaml file"
        ) from None


def _one_length(values: Mapping[str, Any], origin: str) -> None:
    if values.get("steps") is not None and values.get("epochs") is not None:
        raise UserError(
            f"{origin}: steps={values['steps']} and epochs={values['epochs']} both say how long to train: drop one"
        )
