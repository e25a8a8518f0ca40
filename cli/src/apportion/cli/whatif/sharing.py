"""How fast a run goes that shares its device: medians of what others measured on real GPUs. Pure.

Two on a device: 1,272 speeds of training pairs on a V100 under MPS (``stanford-futuredata/gavel`` c4fa400973, MIT;
OSDI 2020). Three to five: copies of 11 inference models on a whole A100 80 GB under MPS, throughput of a copy against
one copy alone (``MunQ-Lee/ParvaGPU_SC24`` 5f3de1e185, MIT). Beyond, five copies' throughput is shared by all. Single
pairs differ much: a tenth of the V100's are below 0.31, a tenth lose nothing. A mix is known no better than that.
"""

from typing import Final

ALONE: Final = 1_000
_MEASURED: Final = (ALONE, 678, 593, 493, 457)
"""Thousandths of the speed alone, by how many share the device."""


def speed(sharing: int) -> int:
    """Thousandths of its speed alone that a run has on a device which so many runs share, itself among them.

    >>> [speed(n) for n in (1, 2, 3, 5, 10)]
    [1000, 678, 593, 457, 228]
    """
    most = len(_MEASURED)
    return _MEASURED[max(1, sharing) - 1] if sharing <= most else _MEASURED[-1] * most // sharing
