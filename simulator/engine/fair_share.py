"""Constants of link sharing that every engine with contention obeys (docs/model.md, eq. E3a)."""

from __future__ import annotations

CAPACITY_UNITS = 1 << 44
"""A link's capacity in the integer unit of offered loads. Integers do not drift over any number of starts
and ends, and their sum does not depend on the order."""
TIGHT_LOAD = CAPACITY_UNITS + 17
"""Offered load above which a link may slow flows: its capacity plus 1e-12 of it for rounding."""

MOST_LINKS_IN_STEPS = 256
"""Pools with at most this many links raise all rates of a group step by step (`max_min_rates_of_few`); larger
ones settle links by rounds (`fair_bandwidths`). Both are exact; they differ in the last digits of a rate, so
engines must choose alike. Measured in docs/performance.md."""
