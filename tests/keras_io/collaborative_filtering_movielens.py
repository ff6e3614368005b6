"""Follows https://keras.io/examples/structured_data/collaborative_filtering_movielens/: ratings by
two embeddings.

Its `tensordot` of two axes is one number for the whole batch, as published.
"""

from typing import Any

import keras
import numpy as np
from keras import layers, ops

USERS = 610
MOVIES = 9724
WIDTH = 50


class RecommenderNet(keras.Model):
    def __init__(self, users: int, movies: int, width: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        options = {
            "embeddings_initializer": "he_normal",
            "embeddings_regularizer": keras.regularizers.l2(1e-6),
        }
        self.users, self.movies = (
            layers.Embedding(count, width, **options) for count in (users, movies)
        )
        self.user_bias, self.movie_bias = (layers.Embedding(count, 1) for count in (users, movies))

    def call(self, pairs: Any) -> Any:
        user = pairs[:, 0]
        movie = pairs[:, 1]
        together = ops.tensordot(self.users(user), self.movies(movie), 2)
        return ops.nn.sigmoid(together + self.user_bias(user) + self.movie_bias(movie))


# Glue


def data(config: Any) -> Any:
    draw = np.random.default_rng(0)
    return np.stack(
        [draw.integers(0, USERS, 64), draw.integers(0, MOVIES, 64)], axis=1
    ), draw.random(64)


def build(config: Any, dataset: Any) -> keras.Model:
    model = RecommenderNet(USERS, MOVIES, WIDTH)
    model.compile(keras.optimizers.Adam(learning_rate=0.001), keras.losses.BinaryCrossentropy())
    return model
