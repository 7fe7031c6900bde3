"""Measures a machine: `calibrate` writes its profile, and `transfer` derives one for a sibling accelerator.

Importing this package needs no GPU and no GPU library.
"""

from __future__ import annotations

from moesim.kernels.calibrate.run import (
    CalibrationProgress,
    Options,
    build_plan,
    calibrate,
)
from moesim.kernels.calibrate.transfer import Statement, statements, transfer

__all__ = [
    "CalibrationProgress",
    "Options",
    "Statement",
    "build_plan",
    "calibrate",
    "statements",
    "transfer",
]
