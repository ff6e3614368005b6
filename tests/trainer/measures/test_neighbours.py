"""Tests precision, recall, density and coverage of few images and of many; test_reference_metrics.py has numbers."""

import numpy as np
import pytest

from trainer.measures import fid
from trainer.measures.fid import NEIGHBOURS, neighbour_metrics


def test_few_images_have_none() -> None:
    real, fake = np.random.default_rng(11).standard_normal((2, 30, 16))
    assert neighbour_metrics(real, fake[:NEIGHBOURS]) == {}
    assert neighbour_metrics(real, fake[: NEIGHBOURS + 1]).keys() == {"precision", "recall", "density", "coverage"}


def test_images_of_all_classes_are_compared_where_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fid, "MOST_IMAGES", 100)
    centres = np.repeat([0.0, 100.0], 100)[:, None]
    real, fake = (centres + np.random.default_rng(seed).normal(size=(200, 2)) for seed in range(2))
    found = neighbour_metrics(real, fake[::-1])
    assert min(found["precision"], found["recall"], found["coverage"]) > 0.7
