"""Allocates as TensorFlow does on GPUs, without memory: best fit with coalescing, in regions that double.

It follows what TensorFlow's BFC allocator does with memory growth, so that fragments are counted, not only bytes:
https://github.com/tensorflow/tensorflow/blob/master/third_party/xla/xla/tsl/framework/bfc_allocator.cc
"""

import bisect
from dataclasses import dataclass

_ROUNDED = 256  # bytes
_FIRST_REGION = 2 * 2**20
_LARGEST_REST = 128 * 2**20  # bytes of a piece that is not given away with a smaller allocation
_APART = 2**12  # regions are no neighbours


@dataclass
class _Piece:
    """Holds a part of a region, and the addresses of its neighbours in it."""

    size: int
    free: bool
    before: int | None = None
    after: int | None = None


class Allocator:
    """Gives addresses, and counts the bytes that are held, with what rounding and rests add."""

    def __init__(self, limit: int | None = None) -> None:
        self.held = 0
        self._limit, self._reserved, self._region = limit or 2**62, 0, _FIRST_REGION
        self._top = 2**62  # a later region lies below
        self._pieces: dict[int, _Piece] = {}
        self._free: list[tuple[int, int]] = []  # size and address, sorted

    def allocate(self, size: int) -> int | None:
        """Returns the address of the smallest free piece that is large enough; None if the limit is reached."""
        size = rounded(size)
        place = bisect.bisect_left(self._free, (size, 0))
        if place == len(self._free):
            if not self._extend(size):
                return None
            place = bisect.bisect_left(self._free, (size, 0))
        _, address = self._free.pop(place)
        piece = self._pieces[address]
        if piece.size >= 2 * size or piece.size - size >= _LARGEST_REST:
            self._split(address, piece, size)
        piece.free = False
        self.held += piece.size
        return address

    def free(self, address: int) -> None:
        """Ends an allocation, and joins the piece with free neighbours."""
        piece = self._pieces[address]
        self.held -= piece.size
        piece.free = True
        if piece.after is not None and self._pieces[piece.after].free:
            self._unlist(piece.after)
            self._join(address, piece.after)
        if piece.before is not None and self._pieces[piece.before].free:
            self._unlist(piece.before)
            self._join(piece.before, address)
            address = piece.before
        bisect.insort(self._free, (self._pieces[address].size, address))

    def _extend(self, size: int) -> bool:
        """Adds a region that holds `size`; returns whether the limit allows it."""
        grown = size > self._region
        while size > self._region:
            self._region *= 2
        available = (self._limit - self._reserved) // _ROUNDED * _ROUNDED
        if size > available:
            return False
        length = min(self._region, available)
        if not grown:
            self._region *= 2
        self._reserved += length
        self._top -= length + _APART
        self._pieces[self._top] = _Piece(length, True)
        bisect.insort(self._free, (length, self._top))
        return True

    def _split(self, address: int, piece: _Piece, size: int) -> None:
        rest = address + size
        self._pieces[rest] = _Piece(piece.size - size, True, address, piece.after)
        if piece.after is not None:
            self._pieces[piece.after].before = rest
        bisect.insort(self._free, (piece.size - size, rest))
        piece.after, piece.size = rest, size

    def _join(self, first: int, second: int) -> None:
        """Makes one piece of two neighbours, none of which is in the list."""
        left, right = self._pieces[first], self._pieces.pop(second)
        left.size += right.size
        left.after = right.after
        if right.after is not None:
            self._pieces[right.after].before = first

    def _unlist(self, address: int) -> None:
        self._free.pop(bisect.bisect_left(self._free, (self._pieces[address].size, address)))


def rounded(size: int) -> int:
    """Returns the bytes that an allocation of `size` takes at least."""
    return max(1, -(-size // _ROUNDED)) * _ROUNDED
