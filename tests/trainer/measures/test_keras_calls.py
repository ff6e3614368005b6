"""What scripts and callbacks call of a model besides fit: on one device, on several, and on another
worker than the chief."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer.base.errors import UserError
from trainer.base.settings.train_config import TrainConfig
from trainer.cluster.cluster_spec import Cluster
from trainer.cluster.strategy import ONE_MACHINE, make_replicas
from trainer.measures.keras_calls import answered_by_replicas
from trainer.run.launched import fixed_strategy, warn_of_shared_file

X = np.arange(14.0).reshape(7, 2)


def compiled() -> Any:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def test_methods_of_one_batch_are_right_or_refused(
    small_config: Callable[..., TrainConfig],
) -> None:
    for count in (1, 2):
        config = small_config(f"--replicas={count}")
        replicas = make_replicas(config)
        strategy = replicas.strategy
        with answered_by_replicas(replicas), strategy.scope(), fixed_strategy(strategy, config):
            model = compiled()
            assert model.predict_on_batch(X) == pytest.approx(model.predict(X, verbose=0))
            if count == 1:
                assert np.isfinite(model.train_on_batch(X, X[:, :1]))
            else:
                with pytest.raises(UserError, match=r"train_on_batch: a loop of its own runs on"):
                    model.train_on_batch(X, X[:, :1])
            within = tf.function(model.test_on_batch, autograph=False)
            with pytest.raises(UserError, match="test_on_batch is called within a step"):
                within(X, X[:, :1])


@pytest.mark.parametrize("hosts", [("one:1", "one:2"), ("one:1", "other:1")])
def test_the_chief_alone_saves_where_all_workers_would(
    hosts: tuple[str, str],
    tmp_path: Path,
    small_config: Callable[..., TrainConfig],
    caplog: pytest.LogCaptureFixture,
) -> None:
    replicas = make_replicas(small_config("--replicas=1"))
    for cluster in (ONE_MACHINE, Cluster(hosts, 1)):
        folder = tmp_path / str(cluster.index)
        folder.mkdir()
        with answered_by_replicas(replace(replicas, cluster=cluster)):
            model = compiled()
            model.save(folder / "whole.keras")
            model.save_weights(folder / "some.weights.h5")
            model.export(filepath=folder / "exported", verbose=False)
            if cluster.index:
                model.save(f"/gcs/{hosts[1]}/whole.keras")
        shared = cluster.index and hosts[0].startswith(hosts[1][:3])
        assert len([*folder.iterdir()]) == (0 if shared else 3)
    assert f"/gcs/{hosts[1]}/whole.keras: all workers would save it" in caplog.text


def test_a_file_that_each_worker_writes_into_a_bucket_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for file, flags in (("/gcs/b/read", 0), ("here", 1), ("/gcs/b/log.csv", 1)):
        warn_of_shared_file("open", (file, None, flags))
    assert [record.message.partition(":")[0] for record in caplog.records] == ["/gcs/b/log.csv"]
