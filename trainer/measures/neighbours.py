"""Measures, by nearest neighbours, how many generated images look real, cover the real ones, or are copies of them.

Precision and recall: Kynkaanniemi et al. 2019, https://arxiv.org/abs/1904.06991. Density and coverage: Naeem et al.
2020, https://arxiv.org/abs/2002.09797. Each set of features is taken for the union of balls around its images, which
reach to their fifth nearest neighbours in that set. Memorisation: Meehan et al. 2020,
https://arxiv.org/abs/2004.05675. All is computed in float64 on the host.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Features = npt.NDArray[np.float64]  # (images, features)

NEIGHBOURS = 5
MOST_IMAGES = 10_000  # of each set: the distances between 10,000 and 10,000 take seconds
_ROWS = 256  # of the distances in memory at a time: 20 MB


def neighbour_metrics(real: Features, fake: Features, neighbours: int = NEIGHBOURS) -> dict[str, float]:
    """Returns precision, recall, density and coverage of generated images; {} of too few.

    At most MOST_IMAGES of each set are compared. All but density are at most 1, and higher is better.
    """
    real, fake = _some(real), _some(fake)
    if min(len(real), len(fake)) <= neighbours:
        return {}
    real_radii, fake_radii = _radii(real, neighbours), _radii(fake, neighbours)
    within_real = np.zeros(len(fake))  # how many balls of real images hold each generated one
    within_fake, nearest = np.zeros(len(real), bool), np.full(len(real), np.inf)
    for rows, distances in _distances(fake, real):
        within_real[rows] = (distances < real_radii).sum(axis=1)
        within_fake |= (distances < fake_radii[rows, np.newaxis]).any(axis=0)
        nearest = np.minimum(nearest, distances.min(axis=0))
    return {
        "precision": float((within_real > 0).mean()),
        "recall": float(within_fake.mean()),
        "density": float(within_real.mean() / neighbours),
        "coverage": float((nearest < real_radii).mean()),
    }


def memorisation(real: Features, fake: Features, unseen: Features) -> float:
    """Returns the probability that a generated image is nearer to a training image than an unseen real image is.

    real: images that were trained on; unseen: real images that were not. It is the Mann-Whitney statistic of the
    distances to the nearest training image, which Meehan et al. test, divided by the number of pairs, with all images
    in one cell. 0.5: generated images are as near as unseen ones; towards 1: copies; below 0.5: far from real images.
    """
    near, others = _nearest(_some(fake), real), np.sort(_nearest(_some(unseen), real))
    nearer = 2 * len(others) - np.searchsorted(others, near, "left") - np.searchsorted(others, near, "right")
    return float(nearer.mean() / (2 * len(others)))  # both sides: equal distances count half


def _some(features: Features) -> Features:
    """Returns all rows if they are few, else MOST_IMAGES, evenly spread: they may be sorted by class."""
    if len(features) <= MOST_IMAGES:
        return features
    return features[np.linspace(0, len(features) - 1, MOST_IMAGES).astype(np.int64)]


def _nearest(images: Features, real: Features) -> Features:
    """Returns the squared distance of each image to the nearest of `real`."""
    return np.concatenate([distances.min(axis=1) for _, distances in _distances(images, real)])


def _radii(features: Features, neighbours: int) -> Features:
    """Returns the squared distance of each row to its nearest neighbour of that number, itself not counted."""
    radii = np.empty(len(features))
    for rows, distances in _distances(features, features):
        distances[np.arange(len(distances)), np.arange(len(features))[rows]] = np.inf
        radii[rows] = np.partition(distances, neighbours - 1, axis=1)[:, neighbours - 1]
    return radii


def _distances(one: Features, other: Features) -> Iterator[tuple[slice, Features]]:
    """Yields some rows of `one`, and their squared distances to all rows of `other`."""
    squares, others = np.einsum("ij,ij->i", one, one), np.einsum("ij,ij->i", other, other)
    for start in range(0, len(one), _ROWS):
        rows = slice(start, start + _ROWS)
        yield rows, np.maximum(squares[rows, np.newaxis] + others - 2 * one[rows] @ other.T, 0.0)
