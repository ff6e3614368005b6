"""Evaluates the model that a run trained, or predicts with it, on any number of replicas of this
machine.

It uses the exported model if Keras can load it and, to evaluate, if it is compiled. Otherwise, and
for a checkpoint, the run's own function builds the model again.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from trainer.base.errors import UserError
from trainer.base.log import log
from trainer.base.run_files.job_files import CHECKPOINTS, MODEL, items, mapping, step_name
from trainer.base.settings.model_settings import MODELS
from trainer.base.settings.train_config import TrainConfig
from trainer.cluster.strategy import ONE_MACHINE, Replicas, local_devices, make_replicas
from trainer.data.dataset import Dataset
from trainer.data.examples import AnyExamples
from trainer.data.sources import load_dataset
from trainer.invariance.internals import build_compiled
from trainer.invariance.layers import refresh_normalization
from trainer.measures import prediction
from trainer.measures.evaluation import Evaluation, why_not_evaluated
from trainer.models.construction import build_model
from trainer.reporting.classification import Classification
from trainer.run.export import load_template, load_template_weights
from trainer.run.requested_run import BEST, NEWEST, RequestedRun
from trainer.run.training_setup import set_precision_and_seed
from trainer.training.checkpoint import Damaged, checkpoint_folders, load_weights, read_checkpoint
from trainer.user_code.interface import ModelInterface, output_names
from trainer.user_code.mistakes import as_user_mistake, load_function, message_of


def evaluate_run(run: RequestedRun) -> tuple[dict[str, float], int, Classification | None]:
    """Returns loss and metrics, the number of examples and, for a classifier, its classes.

    Raises UserError if the data do not fit the model, or if it has nothing to evaluate.
    """
    config = run.config
    weights, replicas = _begin(run, "evaluates")
    dataset = load_dataset(config, trains=False)
    examples = _examples_to_use(run, dataset)
    dataset = _with_classes_of_run(run, dataset)

    # The exported model is used if it was saved compiled, else one that the run's function builds.
    model = _load_exported(run, weights, replicas, compiled=True)
    if model is None or not model.compiled:
        model = _rebuild_model(run, run.model_config, dataset, weights, replicas)
    else:
        with _reporting_misfits(run, dataset), replicas.strategy.scope():
            build_compiled(
                model,
                dataset.step_data(tf.nest.map_structure(tf.convert_to_tensor, examples.first(1))),
            )
    if why := why_not_evaluated(model):
        raise UserError(f"{run.name} has nothing to evaluate: {why}")
    evaluation = Evaluation(
        model,
        replicas,
        examples,
        config.evaluation_batch,
        dataset.step_data,
        dataset.class_names,
    )
    with _reporting_misfits(run, dataset):
        values = evaluation()
    results = {name.removeprefix("val_"): value for name, value in values.items()}
    return results, examples.count, evaluation.classes


def predict_run(run: RequestedRun) -> tuple[dict[str, Any], int]:
    """Returns the outputs as arrays (rows, …) by name, and the number of examples.

    Raises UserError like `evaluate`.
    """
    config = run.config
    weights, replicas = _begin(run, "predicts with")
    network = _load_exported(run, weights, replicas)
    if network is None:
        trained_on = load_dataset(run.trained, trains=False)
        model = _rebuild_model(run, run.trained, trained_on, weights, replicas)
        network = ModelInterface.of(model).templates()["model"]
    dataset = load_dataset(config, trains=False)
    examples = _examples_to_use(run, dataset)
    with _reporting_misfits(run, dataset):
        outputs = prediction.predict(
            network, replicas, examples, config.evaluation_batch, dataset.step_data
        )
        arrays = dict(prediction.named_outputs(outputs, output_names(network)))
    return arrays, examples.count


def weights_path(run: RequestedRun) -> Path:
    """Returns the template model's file or, with --checkpoint, that folder.

    Raises UserError if it does not exist.
    """
    choice = run.options.checkpoint
    if not choice:
        for name in ("model.keras", "model.weights.h5"):
            if (file := run.folder / MODEL / name).is_file():
                return file
        raise UserError(
            f"{run.name} has no {MODEL}/model.keras yet: wait until the run is done, or use"
            f" --checkpoint={NEWEST}"
        )

    # A checkpoint is chosen by its step, as the newest, or as the best.
    checkpoints = {folder.name: folder for folder in checkpoint_folders(run.folder / CHECKPOINTS)}
    if not checkpoints:
        raise UserError(f"{run.name} has no checkpoint: leave out --checkpoint to use its model/")
    newest = [*checkpoints][-1]
    if choice == NEWEST:
        name = newest
    elif choice == BEST:  # the newest checkpoint knows which one is the best
        try:
            manifest, _ = read_checkpoint(checkpoints[newest])
        except Damaged as error:
            raise UserError(
                f"{run.name}: its newest checkpoint is damaged ({error}): use --checkpoint=STEP"
            ) from None
        best = manifest["state"].get("best")
        if not best:
            raise UserError(
                f"{run.name} has measured no metric by which one checkpoint is the best: use"
                f" {NEWEST}"
            )
        name = step_name(int(best["step"]))
    else:
        name = step_name(int(choice))
    if name not in checkpoints:
        raise UserError(f"{run.name} has no checkpoint {name}: it keeps {', '.join(checkpoints)}")
    return checkpoints[name]


def _begin(run: RequestedRun, action: str) -> tuple[Path, Replicas]:
    """Returns the run's weights, and this machine's replicas, in the run's precision.

    Each replica takes a whole evaluation batch at a time.
    """
    config = run.config
    weights = weights_path(run)
    batch = config.evaluation_batch
    devices = len(local_devices(config, ONE_MACHINE))
    replicas = make_replicas(dataclasses.replace(config, global_batch_size=devices * batch))
    log.info(f"{action} {weights}, {batch} rows at a time, on {', '.join(replicas.devices)}")
    set_precision_and_seed(config)
    return weights, replicas


def _examples_to_use(run: RequestedRun, dataset: Dataset) -> AnyExamples:
    """Returns the evaluation examples if there are any, else all examples of other data.

    Raises UserError if the run's own data have no evaluation examples.
    """
    if dataset.evaluation is None and not run.has_other_data:
        raise UserError(
            f"{run.name}: its data {run.config.data} have no evaluation part: use --data"
        )
    return dataset.evaluation or dataset.train


def _with_classes_of_run(run: RequestedRun, dataset: Dataset) -> Dataset:
    """Returns the dataset with the class names of the run.

    Raises UserError if its examples or classes differ.
    """
    about = mapping(run.info, "data")
    trained_shape = str(about.get("example", dataset.shape))
    x = dataset.shape.split(" -> ")[0]
    trained_x = trained_shape.split(" -> ")[0]
    if x != trained_x:
        raise UserError(
            f"data={run.config.data}: an example is {x}, but {run.name} was trained on {trained_x}"
        )
    if not dataset.train.labelled and " -> " in str(about.get("example")):
        raise UserError(
            f"data={run.config.data}: it has no targets to evaluate: use trainer.predict for such"
            " rows"
        )

    # Classes must have the same names; only of plain labels the largest may be missing here.
    names = dataset.class_names
    trained_names = tuple(map(str, items(about, "classes")))
    numbers = tuple(map(str, range(len(names))))
    if names != trained_names and (names != numbers or names != trained_names[: len(names)]):
        these, those = (
            ", ".join(classes[:10]) + ", …" * (len(classes) > 10) or "none"
            for classes in (names, trained_names)
        )
        raise UserError(
            f"data={run.config.data}: its classes are {these}, but those of {run.name} are {those}:"
            " the same labels would stand for others"
        )
    return dataclasses.replace(dataset, class_names=trained_names)


def _rebuild_model(
    run: RequestedRun, config: TrainConfig, dataset: Dataset, weights: Path, replicas: Replicas
) -> keras.Model:
    """Builds the model by the run's function and loads `weights`.

    Raises UserError if they cannot be loaded into it.
    """
    with replicas.strategy.scope():
        model = build_model(config, dataset)
        if run.options.checkpoint:
            load_weights(model, weights, replicas, str(weights))
        else:
            load_template_weights(model, weights, str(weights))
    refresh_normalization(model)
    return model


def _load_exported(
    run: RequestedRun, path: Path, replicas: Replicas, *, compiled: bool = False
) -> keras.Model | None:
    """Loads the exported network.

    Returns None for a checkpoint, or if the file has a class that is not registered.
    compiled: whether to give it the loss and metrics that the file holds, if any.
    """
    if run.options.checkpoint:
        return None
    if run.config.model not in MODELS:
        # The import registers the user's classes; a model of Keras's own layers needs none.
        with suppress(UserError):
            load_function(run.config.model, "model")
    with suppress(UserError), replicas.strategy.scope():
        return load_template(path, str(path), compiled=compiled)
    return None


@contextmanager
def _reporting_misfits(run: RequestedRun, dataset: Dataset) -> Iterator[None]:
    """Opens the data for the block, and reports data that do not fit the model."""
    try:
        with dataset.reading():
            yield
    except (
        ValueError,
        TypeError,
        KeyError,
        tf.errors.InvalidArgumentError,
        tf.errors.UnimplementedError,
    ) as error:
        raise as_user_mistake(error) or UserError(
            f"data={run.config.data}: an example is {dataset.shape}, which does not fit the model"
            f" of {run.name}: {message_of(error)}"
        ) from error
