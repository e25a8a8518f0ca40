"""Repeatable draws: a small generator of our own, since policies may not reach for a source of chance."""

_MASK = (1 << 64) - 1


class Draws:
    """An endless sequence of integers that its seed determines (the mixing function of splitmix64)."""

    def __init__(self, seed: int) -> None:
        self._state = seed & _MASK

    def below(self, bound: int) -> int:
        """An integer from 0 to bound - 1; the bias is below bound / 2**64."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        mixed = self._state
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        return (mixed ^ (mixed >> 31)) * bound >> 64
