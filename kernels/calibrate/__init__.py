"""Measuring a machine: `calibrate` writes its profile, `transfer` makes a sibling's.

Importing this package needs no GPU and no GPU library.
"""

from __future__ import annotations

from moesim.kernels.calibrate.plan import build_plan, measurement_names
from moesim.kernels.calibrate.run import Options, Progress, calibrate
from moesim.kernels.calibrate.transfer import Statement, statements, transfer

__all__ = [
    "Options",
    "Progress",
    "Statement",
    "build_plan",
    "calibrate",
    "measurement_names",
    "statements",
    "transfer",
]
