"""What is kept of every job request for as long as the streams are, in fixed-size records.

Idempotency has no horizon here, so this grows with each request, and only by bytes that can't be left out: some 80 a
request, 105 where it has an idempotency key. Texts of any length come in as digests of 16 bytes; two different ones
with the same would have to be searched for, and 2^64 tries at that.

Says nothing of what any of it means: `state` does.
"""

import sys
from array import array
from bisect import bisect_left, bisect_right
from typing import Final

KEY_BYTES: Final = 16
BLOCK_MAX: Final = 2048
"""Entries of a block before it is split: an insertion moves half of one."""
_LOW: Final = (1 << 64) - 1


class Table:
    """Keys of 16 bytes to numbers of 64 bits, in order of their keys: 24 bytes an entry, and what blocks leave free.

    A dict of the same entries takes several times the memory. Each block is three arrays (upper and lower half of the
    key, value), searched by the upper halves, and blocks are found by their first. Equal contents give equal bytes,
    however they came in.
    """

    __slots__ = ("_firsts", "_high", "_low", "_values")

    def __init__(self, data: tuple[bytes, bytes, bytes] = (b"", b"", b"")) -> None:
        whole = tuple(_array(part) for part in data)
        highs = whole[0]
        cuts = [0]
        for at in range(BLOCK_MAX * 3 // 4, len(highs), BLOCK_MAX * 3 // 4):
            cut = bisect_left(highs, highs[at])  # equal upper halves stay together
            if cut > cuts[-1]:
                cuts.append(cut)
        ends = (*cuts[1:], len(highs)) if highs else ()
        self._high, self._low, self._values = (
            [part[start:end] for start, end in zip(cuts, ends, strict=bool(highs))] for part in whole
        )
        self._firsts = [block[0] for block in self._high]

    def __len__(self) -> int:
        return sum(map(len, self._high))

    def get(self, key: bytes) -> int | None:
        """The value of the key; None where there is none."""
        high, low = _halves(key)
        number = bisect_right(self._firsts, high) - 1
        if number < 0:
            return None
        at, is_there = self._place(number, high, low)
        return self._values[number][at] if is_there else None

    def put(self, key: bytes, value: int, *, is_kept: bool = False) -> None:
        """The key has this value from here on; where it ``is_kept``, only if it has none yet."""
        high, low = _halves(key)
        if not self._firsts:
            self._firsts.append(high)
            self._high.append(array("Q", (high,)))
            self._low.append(array("Q", (low,)))
            self._values.append(array("Q", (value,)))
            return
        number = max(0, bisect_right(self._firsts, high) - 1)
        at, is_there = self._place(number, high, low)
        if is_there:
            if not is_kept:
                self._values[number][at] = value
            return
        self._high[number].insert(at, high)
        self._low[number].insert(at, low)
        self._values[number].insert(at, value)
        if not at:
            self._firsts[number] = high
        if len(self._high[number]) > BLOCK_MAX:
            self._split(number)

    def _place(self, number: int, high: int, low: int) -> tuple[int, bool]:
        """Where in the block the key is, or would be; and whether it is there."""
        highs, lows = self._high[number], self._low[number]
        at = bisect_left(highs, high)
        # Two keys with the same upper half are as good as never seen, and no reason to answer for the wrong one.
        while at < len(highs) and highs[at] == high and lows[at] < low:
            at += 1
        return at, at < len(highs) and highs[at] == high and lows[at] == low

    def _split(self, number: int) -> None:
        highs = self._high[number]
        half = bisect_left(highs, highs[len(highs) // 2])
        if not half:
            return  # its upper halves are all equal up to there: found by the first, they stay together
        for part in (self._high, self._low, self._values):
            block = part[number]
            part.insert(number + 1, block[half:])
            del block[half:]
        self._firsts.insert(number + 1, self._high[number + 1][0])

    def to_bytes(self) -> tuple[bytes, bytes, bytes]:
        """All entries in order, for the constructor."""
        high, low, values = (b"".join(map(_bytes, part)) for part in (self._high, self._low, self._values))
        return high, low, values


class Column:
    """Sequences in rising order, each with a record of a fixed width: what a stream said, as it said it."""

    __slots__ = ("_records", "_seqs", "_width")

    def __init__(self, record_bytes: int, seqs: bytes = b"", records: bytes = b"") -> None:
        self._width = record_bytes
        self._seqs = _array(seqs)
        self._records = bytearray(records)

    def __len__(self) -> int:
        return len(self._seqs)

    def append(self, seq: int, record: bytes) -> None:
        """One more; its sequence is above all before it."""
        assert len(record) == self._width, f"a record of {len(record)} bytes"
        assert not self._seqs or seq > self._seqs[-1], f"{seq} after {self._seqs[-1]}"
        self._seqs.append(seq)
        self._records += record

    def get(self, seq: int) -> bytes | None:
        """The record of that sequence; None where there is none."""
        at = bisect_left(self._seqs, seq)
        if at == len(self._seqs) or self._seqs[at] != seq:
            return None
        return bytes(self._records[at * self._width : (at + 1) * self._width])

    def to_bytes(self) -> tuple[bytes, bytes]:
        """Sequences and records, for the constructor."""
        return _bytes(self._seqs), bytes(self._records)


def of_seq(seq: int) -> bytes:
    """A sequence as eight bytes."""
    return seq.to_bytes(8, "big")


def to_seq(data: bytes) -> int:
    """The sequence that the first eight bytes are."""
    return int.from_bytes(data[:8], "big")


def _halves(key: bytes) -> tuple[int, int]:
    assert len(key) == KEY_BYTES, f"a key of {len(key)} bytes"
    number = int.from_bytes(key, "big")
    return number >> 64, number & _LOW


def _array(data: bytes) -> "array[int]":
    numbers = array("Q")
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _bytes(numbers: "array[int]") -> bytes:
    if sys.byteorder == "big":
        numbers = numbers[:]
        numbers.byteswap()
    return numbers.tobytes()
