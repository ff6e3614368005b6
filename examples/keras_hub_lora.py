"""python -m trainer.task --model=examples.keras_hub_lora:build \
    --data=examples.keras_hub_lora:data --texts=docs --global_batch_size=32 --micro_batches=2 \
    --learning_rate=1e-2 --epochs=2 --job_dir=runs/keras_hub_lora

Tunes a language model of KerasHub to the texts of a folder by LoRA: its weights stay as they are,
but for the biases of each query and value of the attention; two small matrices for each of these
are trained. It needs the package keras-hub. This command needs no network, and only shows that it
runs: the model starts from random weights, and reads bytes. `--preset=gpt2_base_en --length=256
--rank=8 --learning_rate=5e-5` tunes GPT-2, which KerasHub downloads; `--preset` may also be a
folder. model/model.keras has the matrices merged into the weights.
"""

from pathlib import Path
from typing import Any

import keras
import keras_hub
import numpy as np

from trainer.base.errors import UserError
from trainer.base.settings.train_config import TrainConfig
from trainer.data.dataset import Dataset


def data(config: TrainConfig, *, texts: str, preset: str = "", length: int = 64) -> Any:
    """Returns (x, y): what KerasHub's models take, (windows, length) each, and the token that
    follows each one."""
    files = sorted(path for path in Path(texts).rglob("*") if path.suffix in {".txt", ".md"})
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in files)
    if preset:
        tokens = np.asarray(keras_hub.models.Tokenizer.from_preset(preset)(text), "int32")
    else:
        tokens = np.frombuffer(text.encode(), "uint8").astype("int32")
    windows = (len(tokens) - 1) // length
    if windows < 1:
        raise UserError(
            f"texts={texts}: its .txt and .md files have {len(tokens)} tokens: {length + 1} or more"
        )
    read, following = (
        tokens[first : first + windows * length].reshape(windows, length) for first in (0, 1)
    )
    return {"token_ids": read, "padding_mask": np.ones_like(read)}, following


def build(
    config: TrainConfig, dataset: Dataset, *, preset: str = "", length: int = 64, rank: int = 4
) -> keras.Model:
    """Returns a compiled Keras model: the logits of the next token, by the vectors of the tokens
    themselves."""
    if preset:
        backbone = keras_hub.models.Backbone.from_preset(preset)
    else:
        backbone = keras_hub.models.GPT2Backbone(
            vocabulary_size=256,
            num_layers=2,
            num_heads=4,
            hidden_dim=64,
            intermediate_dim=128,
            max_sequence_length=length,
        )
    backbone.enable_lora(rank)
    logits = backbone.token_embedding(backbone.output, reverse=True)
    model = keras.Model(backbone.input, logits)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(config.learning_rate), loss, metrics=["accuracy"])
    return model
