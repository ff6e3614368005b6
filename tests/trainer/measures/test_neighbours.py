"""Tests what precision, recall, density and coverage mean."""

import numpy as np
import pytest

from trainer.measures import neighbours
from trainer.measures.neighbours import NEIGHBOURS, neighbour_metrics

Arrays = tuple[np.ndarray, np.ndarray]


def near_sets() -> Arrays:
    """Returns real and generated features; some real ones are near each other, some generated ones are copies."""
    draw = np.random.default_rng(11)
    real, fake = draw.standard_normal((300, 16)), draw.standard_normal((260, 16)) * 0.8 + 0.3
    real[:40] = real[40:80] + 1e-3 * draw.standard_normal((40, 16))
    fake[:20] = real[:20]
    return real, fake


def test_they_are_what_the_balls_written_out_give() -> None:
    real, fake = (features[:30] for features in near_sets())

    def radius(point: np.ndarray, others: np.ndarray) -> float:
        return sorted(float(np.linalg.norm(point - other)) for other in others)[NEIGHBOURS]  # the first is itself

    holds = np.array([[np.linalg.norm(x - y) < radius(x, real) for y in fake] for x in real])
    held = np.array([[np.linalg.norm(x - y) < radius(y, fake) for y in fake] for x in real])
    expected = {
        "precision": holds.any(axis=0).mean(),
        "recall": held.any(axis=1).mean(),
        "density": holds.sum() / (NEIGHBOURS * len(fake)),
        "coverage": holds.any(axis=1).mean(),
    }
    assert neighbour_metrics(real, fake) == pytest.approx(expected)


@pytest.mark.parametrize(("fake", "low", "high"), [
    ("one image", {"recall", "coverage"}, {"precision"}),
    ("far away", {"precision", "recall", "density", "coverage"}, set()),
    ("the same distribution", set(), {"precision", "recall", "density", "coverage"}),
])  # fmt: skip
def test_what_each_means(fake: str, low: set[str], high: set[str]) -> None:
    draw = np.random.default_rng(1)
    real, other = draw.standard_normal((2, 700, 8))
    generated = {"one image": real[:1] + 1e-6 * other, "far away": other + 100, "the same distribution": other}[fake]
    found = neighbour_metrics(real, generated)
    assert {name for name, value in found.items() if value < 0.05} >= low
    assert {name for name, value in found.items() if value > 0.75} >= high


def test_few_images_have_none() -> None:
    real, fake = near_sets()
    assert neighbour_metrics(real, fake[:NEIGHBOURS]) == {}
    assert neighbour_metrics(real, fake[: NEIGHBOURS + 1]).keys() == {"precision", "recall", "density", "coverage"}


def test_images_of_all_classes_are_compared_where_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "MOST_IMAGES", 100)
    centres = np.repeat([0.0, 100.0], 100)[:, None]
    real, fake = (centres + np.random.default_rng(seed).normal(size=(200, 2)) for seed in range(2))
    found = neighbour_metrics(real, fake[::-1])
    assert min(found["precision"], found["recall"], found["coverage"]) > 0.7
