"""Measures, by nearest neighbours, how many generated images look real, and how many real ones they cover.

Precision and recall: Kynkaanniemi et al. 2019, https://arxiv.org/abs/1904.06991. Density and coverage: Naeem et al.
2020, https://arxiv.org/abs/2002.09797. Each set of features is taken for the union of balls around its images, which
reach to their fifth nearest neighbours in that set. All is computed in float64 on the host.
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
    real, fake = _sample(real), _sample(fake)
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


def _sample(features: Features) -> Features:
    """Returns all rows if they are few, else MOST_IMAGES, evenly spread: they may be sorted by class."""
    if len(features) <= MOST_IMAGES:
        return features
    return features[np.linspace(0, len(features) - 1, MOST_IMAGES).astype(np.int64)]


def _radii(features: Features, neighbours: int) -> Features:
    """Returns the squared distance of each row to its nearest neighbour of that number, itself not counted."""
    radii = np.empty(len(features))
    for rows, distances in _distances(features, features):
        distances[np.arange(len(distances)), np.arange(len(features))[rows]] = np.inf
        radii[rows] = np.partition(distances, neighbours - 1, axis=1)[:, neighbours - 1]
    return radii


def _distances(images: Features, centres: Features) -> Iterator[tuple[slice, Features]]:
    """Yields a slice of `images`, and the squared distances of these rows to all `centres`."""
    squares, others = np.einsum("ij,ij->i", images, images), np.einsum("ij,ij->i", centres, centres)
    for start in range(0, len(images), _ROWS):
        rows = slice(start, start + _ROWS)
        yield rows, np.maximum(squares[rows, np.newaxis] + others - 2 * images[rows] @ centres.T, 0.0)
