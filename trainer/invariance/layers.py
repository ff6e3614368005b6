"""Makes layers give the same numbers on any number of replicas, in place, and holds helpers that
models share.

Layers keep their classes, names, weights and settings, so that templates hold Keras's own layers.
"""

import keras
import tensorflow as tf

from trainer.base.errors import UserError
from trainer.base.settings.train_config import TrainConfig
from trainer.invariance.batch_norm import normalize_in_place
from trainer.invariance.internals import all_layers, layers_by_path
from trainer.invariance.keras_draws import draw_by_row, draw_by_row_everywhere

# Layers of Keras that cannot be made independent of replicas and of micro-batches, and what they
# do.
_DEPENDENT = {
    "MixUp": "mixes the rows of one replica",
    "CutMix": "mixes the rows of one replica",
    "AugMix": "chooses its changes by Python's random numbers, once for each replica",
    "RandomElasticTransform": "draws the shifts of pixels separately on each replica",
}


def make_independent(model: keras.Model, config: TrainConfig) -> None:
    """Makes the layers of `model` independent of the number of replicas.

    These are the layers that draw random numbers or normalise batches. Call it once, under the
    strategy's scope. It reaches every layer that Keras tracks, in subclassed models too. With
    --virtual_replicas, which promises equal bits, raises UserError if a layer cannot be made
    independent.
    """
    draw_by_row_everywhere()
    for path, layer in layers_by_path(model).items():
        draw_by_row(layer, path)
        if isinstance(layer, keras.layers.BatchNormalization):
            several = tf.distribute.get_strategy().num_replicas_in_sync > 1
            normalize_in_place(layer, synchronized=config.sync_batch_norm and several)
    if config.virtual_replicas and (reasons := depends_on_replicas(model, 2, 2, virtual=True)):
        raise UserError(
            f"virtual_replicas={config.virtual_replicas}: {reasons[0]}: drop that, or"
            " --virtual_replicas"
        )


def depends_on_replicas(
    model: keras.Model, replicas: int, micro_batches: int = 1, *, virtual: bool = False
) -> list[str]:
    """Returns reasons, from its layers, why steps of `model` on several replicas may differ.

    Several micro-batches add reasons of their own. Each layer has a line, but all batch norm over
    micro-batches has one together. With `virtual` replicas batch norm is no reason, unless a user's
    own layer updates its moving averages.
    """
    if replicas == micro_batches == 1:
        return []

    # Each layer is looked at by itself, and batch norm over micro-batches is named once for all.
    reasons = []
    normalising = []
    for path, layer in layers_by_path(model).items():
        normalises = isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
        if normalises and virtual and "call" not in vars(layer):
            reasons.append(f"{path} moves its averages in each micro-batch, by code of its own")
        elif normalises and not virtual:
            normalising.append(path)
            if replicas > 1 and not layer.synchronized:
                reasons.append(f"{path} normalises one replica's rows: use --sync_batch_norm=true")
        if micro_batches > 1 and isinstance(layer, keras.layers.SpectralNormalization):
            reasons.append(f"{path} makes an iteration in each of micro_batches={micro_batches}")
        kinds = [name for name in _DEPENDENT if isinstance(layer, getattr(keras.layers, name))]
        reasons.extend(f"{path} {_DEPENDENT[kind]}" for kind in kinds)
    if micro_batches > 1 and normalising:
        more = f" (and {len(normalising) - 1} more of batch norm)" if normalising[1:] else ""
        reasons.append(
            f"{normalising[0]}{more} normalises the rows of one of micro_batches={micro_batches}"
            " alone"
        )
    return reasons


def refresh_normalization(model: keras.Model) -> None:
    """Makes Keras's Normalization layers use newly assigned weights.

    They compute with values that they have derived earlier.
    """
    for layer in all_layers(model):
        if isinstance(layer, keras.layers.Normalization):
            layer.finalize_state()


def full_precision() -> str:
    """Returns the dtype of weights.

    Outputs and losses have it too, where other layers compute in 16 bits.
    """
    return str(keras.config.dtype_policy().variable_dtype)
