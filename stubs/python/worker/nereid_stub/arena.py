"""Memory for outputs: segments that this process makes and lends, as package arena in Go does.

Every lease has one of a few sizes. One that comes back is used for the next of its size, most
recent first, since memory just used is warm. What finds none is cut from a free span; when
there is none and the limit is reached, the leases kept by size are merged back into spans.
"""

import fcntl
import mmap
import os

from . import wire

_SEALS = 1 | 2 | 4  # seal, shrink, grow: the size is fixed, the contents are ours to write
_ADD_SEALS = 1033
_FIRST = 256 << 10
_LARGEST = 64 << 20


class Full(Exception):
    """No room for an output."""


def lease_size(n):
    """n rounded up to one of four steps between powers of two, a multiple of 64."""
    if n <= 256:
        return (n + 63) & ~63 or 64
    step = 1 << ((n - 1).bit_length() - 3)
    return (n + step - 1) & ~(step - 1)


class Arena:
    def __init__(self, limit):
        self.limit = limit
        self.total = 0
        self.segments = []  # memoryviews, by number from wire.FIRST_OUTPUT_SEGMENT on
        self.free = {}  # lease size -> [lease]
        self.sizes = {}  # byte size -> lease size
        self.spans = []  # [number, offset, length]
        self.fresh = []  # (number, fd, byte size) of segments to announce

    def lease(self, n):
        """A lease of n bytes: (segment number, offset, lease size, buffer). Raises Full."""
        size = self.sizes.get(n)
        if size is None:
            size = lease_size(n)
            if len(self.sizes) < 4096:
                self.sizes[n] = size
        free = self.free.get(size)
        if free:
            return free.pop()
        place = self._cut(size)
        if place is None:
            if not self._grow(size):
                self._merge()
            place = self._cut(size)
        if place is None:
            raise Full(
                "no room for %d bytes in an arena of at most %d bytes; raise --output-arena-byte-size"
                % (n, self.limit)
            )
        number, offset = place
        return number, offset, size, self.segments[number - wire.FIRST_OUTPUT_SEGMENT][offset : offset + size]

    def _cut(self, size):
        fitting = [s for s in self.spans if s[2] >= size]
        if not fitting:
            return None
        span = min(fitting, key=lambda s: s[2])
        place = span[0], span[1]
        span[1] += size
        span[2] -= size
        if not span[2]:
            self.spans.remove(span)
        return place

    def _grow(self, size):
        want = min(max(size, _FIRST, self.total), max(size, _LARGEST), self.limit - self.total)
        if want < size:
            return False
        number = wire.FIRST_OUTPUT_SEGMENT + len(self.segments)
        fd = os.memfd_create("nereid output", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, want)
        mapped = mmap.mmap(fd, want)
        fcntl.fcntl(fd, _ADD_SEALS, _SEALS)
        self.fresh.append((number, fd, want))
        self.segments.append(memoryview(mapped))
        self.spans.append([number, 0, want])
        self.total += want
        return True

    def _merge(self):
        pieces = sorted(
            self.spans + [[n, o, size] for leases in self.free.values() for n, o, size, _ in leases]
        )
        self.free, self.spans = {}, []
        for number, offset, length in pieces:
            last = self.spans[-1] if self.spans else None
            if last and last[0] == number and last[1] + last[2] == offset:
                last[2] += length
            else:
                self.spans.append([number, offset, length])

    def release(self, lease):
        self.free.setdefault(lease[2], []).append(lease)
