"""Order statistics of normal draws."""

from __future__ import annotations

from functools import lru_cache
from statistics import NormalDist


@lru_cache(maxsize=1024)
def expected_maximum(n: int) -> float:
    """Expected largest of n standard normal draws (Blom 1958: the quantile at (n - 3/8) / (n + 1/4))."""
    # Rounding to twelve digits gives the same value with every mathematics library.
    return 0.0 if n < 2 else round(NormalDist().inv_cdf((n - 0.375) / (n + 0.25)), 12)
