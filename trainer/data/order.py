"""Shuffles row numbers without holding them: a keyed bijection gives the row at any position of a
pass over the data.

A Feistel network over pairs (Luby and Rackoff 1988, https://doi.org/10.1137/0217022) permutes the
smallest grid that holds all rows; a position whose image lies outside is mapped again until it is a
row (cycle walking: Black and Rogaway 2002, https://doi.org/10.1007/3-540-45760-7_9).
"""

import hashlib
import math

import numpy as np
import numpy.typing as npt

RowNumbers = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

# With 12 rounds on grids of at least 4 x 4, ten million keys give all n! orders of few rows equally
# often; with four rounds, a few thousand keys show a difference for four rows.
_ROUNDS = 12
_LEAST_SIDE = 4
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_HALF = np.uint64(32)


def shuffled(
    positions: RowNumbers, count: int, seed: int, stream: str, passes: int | RowNumbers = 0
) -> RowNumbers:
    """Returns the rows at these positions of an order of `count` rows.

    Each order has every row once. The order is a function of (seed, stream, pass). positions: (n,)
    from 0 to below `count`; passes: one number, or (n,), from 0. Time and memory depend on the
    number of positions alone, for any `count` below 2**62.
    """
    numbers = np.atleast_1d(np.asarray(passes, np.int64))
    numbers, pass_of_position = np.unique(numbers, return_inverse=True)

    # Each round and pass has a key: (rounds, passes).
    digest = hashlib.blake2b(f"{seed}/{stream}".encode(), digest_size=8).digest()
    key = int.from_bytes(digest, "little")
    pass_keys = _mixed(numbers.astype(np.uint64) * _GOLDEN + np.array([key], np.uint64))
    keys = _mixed(pass_keys + np.arange(_ROUNDS, dtype=np.uint64)[:, None] * _GOLDEN)
    if len(numbers) > 1:
        keys = keys[:, pass_of_position.reshape(positions.shape)]

    # A cell of the grid that is no row is mapped again until it is one.
    rows = _permuted(positions.astype(np.uint64), count, keys)
    while len(outside := np.flatnonzero(rows >= np.uint64(count))):
        keys_outside = keys[:, outside] if len(numbers) > 1 else keys
        rows[outside] = _permuted(rows[outside], count, keys_outside)
    return rows.view(np.int64)


def _mixed(words: _Words) -> _Words:
    """Returns each word's image under the bijection of SplitMix64.

    Steele et al., https://doi.org/10.1145/2660193
    """
    words = (words ^ (words >> np.uint64(30))) * _FIRST
    words = (words ^ (words >> np.uint64(27))) * _SECOND
    return words ^ (words >> np.uint64(31))


def _permuted(cells: _Words, count: int, keys: _Words) -> _Words:
    """Returns the images of cells of the grid that holds `count` rows.

    Each round shifts one coordinate by the other. The number of columns is even, so that a round
    can be an odd permutation; even ones alone give half of all orders.
    """
    columns = max(_LEAST_SIDE, 2 * round(math.sqrt(count) / 2))
    sides = [np.uint64(max(_LEAST_SIDE, -(-count // columns))), np.uint64(columns)]
    row = cells // sides[1]
    turned = row
    still = cells - row * sides[1]

    # A round computes in place, as new arrays would take most of its time.
    drawn = np.empty_like(cells)
    shifted = np.empty_like(cells)
    for number, key in enumerate(keys):
        side = sides[number % 2]
        np.add(still, key, out=drawn)
        drawn *= _FIRST
        drawn ^= np.right_shift(drawn, _HALF, out=shifted)
        drawn *= _SECOND
        drawn >>= _HALF
        drawn *= side  # 32 random bits, scaled to the side
        drawn >>= _HALF
        turned += drawn
        # A difference below 0 wraps around to a large number, so that the minimum is the remainder.
        np.minimum(turned, np.subtract(turned, side, out=shifted), out=turned)
        turned, still = still, turned
    turned *= sides[1]
    return turned + still
