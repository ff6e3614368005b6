"""Tests that the measures of images are what other packages compute from the same features.

The stored numbers are those of torch-fidelity 0.4.0 (metric_fid, metric_kid with one subset of all
rows, metric_prc with five neighbours), pytorch-fid 0.3.0 (calculate_frechet_distance) and prdc 0.2
(nearest_k=5), with NumPy 2.4.6.
"""

import numpy as np
import pytest
from numpy.random import Generator

from trainer.measures.fid import frechet_distance, kernel_distance, neighbour_metrics

# By package. torch-fidelity counts images on the edge of a ball too, of which there are none, and
# those in float32.
STORED: dict[str, dict[str, float]] = {
    "torch_fidelity": {
        "fid": 0.8238087234861453,
        "kid": 0.06393436004159936,
        "precision": 0.9791666865348816,
        "recall": 0.8833333253860474,
    },
    "pytorch_fid": {"fid": 0.8238087234861382},
    "prdc": {
        "precision": 0.9791666666666666,
        "recall": 0.8833333333333333,
        "density": 1.2233333333333334,
        "coverage": 0.9916666666666667,
    },
}


def test_ours_are_the_stored_numbers() -> None:
    """Compares features (240, 12) of real and of generated images; some generated ones are near
    copies."""
    draw = Generator(np.random.Philox(28))
    mixed = np.eye(12) + 0.3 * draw.standard_normal((12, 12))
    real, fake, _ = draw.standard_normal((3, 240, 12)) @ mixed
    fake = 0.9 * fake + 0.2
    fake[:40] = real[:40] + 0.05 * draw.standard_normal((40, 12))
    distances = {"fid": frechet_distance(real, fake), "kid": kernel_distance(real, fake)}
    found = distances | neighbour_metrics(real, fake)
    for numbers in STORED.values():
        assert {name: found[name] for name in numbers} == pytest.approx(numbers, rel=1e-7)
    assert {name for numbers in STORED.values() for name in numbers} == found.keys()
    # With more features than images, too: features of 0 change nothing.
    wide = (np.pad(features, ((0, 0), (0, 240))) for features in (real, fake))
    assert frechet_distance(*wide) == pytest.approx(found["fid"], rel=1e-7)
