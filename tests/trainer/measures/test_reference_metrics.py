"""Tests that the measures of images are what other packages compute from the same features.

The stored numbers were computed by the slow tests of this file with torch-fidelity 0.4.0, pytorch-fid 0.3.0, prdc 0.2
and NumPy 2.4.6. None of these packages is needed otherwise: pip install torch-fidelity pytorch-fid prdc
"""

import contextlib
import io
from collections.abc import Callable

import numpy as np
import pytest

from trainer.measures.fid import Features, frechet_distance, kernel_distance, neighbour_metrics

Numbers = dict[str, float]

# By package. torch-fidelity counts images on the edge of a ball too, of which there are none, and those in float32.
STORED: dict[str, Numbers] = {
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


def feature_sets() -> tuple[Features, Features]:
    """Returns features (240, 12) of real and of generated images; some generated ones are near copies."""
    draw = np.random.Generator(np.random.Philox(28))
    mixed = np.eye(12) + 0.3 * draw.standard_normal((12, 12))
    real, fake, _ = draw.standard_normal((3, 240, 12)) @ mixed
    fake = 0.9 * fake + 0.2
    fake[:40] = real[:40] + 0.05 * draw.standard_normal((40, 12))
    return real, fake


def ours() -> Numbers:
    """Returns all our numbers of these features."""
    real, fake = feature_sets()
    distances = {"fid": frechet_distance(real, fake), "kid": kernel_distance(real, fake)}
    return distances | neighbour_metrics(real, fake)


def torch_fidelity() -> Numbers:
    """Computes FID, KID, precision and recall; the latter two in float32."""
    import torch
    from torch_fidelity import metric_fid, metric_kid, metric_prc

    real, fake = (torch.from_numpy(features) for features in feature_sets())
    statistics = (metric_fid.fid_features_to_statistics(features) for features in (fake, real))
    found = metric_fid.fid_statistics_to_metric(*statistics, verbose=False)
    found |= metric_kid.kid_features_to_metric(fake, real, kid_subsets=1, kid_subset_size=len(real), verbose=False)
    found |= metric_prc.prc_features_to_metric(fake, real, prc_neighborhood=5, prc_batch_size=100, verbose=False)
    names = {"fid": metric_fid.KEY_METRIC_FID, "kid": metric_kid.KEY_METRIC_KID_MEAN,
             "precision": metric_prc.KEY_METRIC_PRECISION, "recall": metric_prc.KEY_METRIC_RECALL}  # fmt: skip
    return {name: float(found[key]) for name, key in names.items()}


def pytorch_fid() -> Numbers:
    """Computes FID."""
    from pytorch_fid.fid_score import calculate_frechet_distance

    real, fake = feature_sets()
    of_both = [part for each in (fake, real) for part in (each.mean(axis=0), np.cov(each, rowvar=False))]
    return {"fid": float(calculate_frechet_distance(*of_both))}


def prdc() -> Numbers:
    """Computes precision, recall, density and coverage."""
    from prdc import compute_prdc

    real, fake = feature_sets()
    with contextlib.redirect_stdout(io.StringIO()):
        return {name: float(value) for name, value in compute_prdc(real, fake, nearest_k=5).items()}


PACKAGES: tuple[Callable[[], Numbers], ...] = (torch_fidelity, pytorch_fid, prdc)


def test_ours_are_the_stored_numbers() -> None:
    found = ours()
    for numbers in STORED.values():
        assert {name: found[name] for name in numbers} == pytest.approx(numbers, rel=1e-7)
    assert {name for numbers in STORED.values() for name in numbers} == found.keys()
    assert STORED.keys() == {package.__name__ for package in PACKAGES}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # these are other packages' own
@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_the_stored_numbers_are_those_of_the_package_that_is_installed(package: Callable[[], Numbers]) -> None:
    name = package.__name__
    pytest.importorskip(name, reason=f"{name} is not installed: pip install {name.replace('_', '-')}")
    assert package() == pytest.approx(STORED[name], rel=1e-7)
