"""Turns measurements of other tools into entries of a calibration profile."""

from __future__ import annotations

from moesim.kernels.importers.common import CalibrationImporter, ImportOption, merge
from moesim.kernels.importers.deepep import deepep_profile
from moesim.kernels.importers.nccl_tests import nccl_tests_profile
from moesim.kernels.importers.registry import CALIBRATION_IMPORTERS

__all__ = [
    "CALIBRATION_IMPORTERS",
    "CalibrationImporter",
    "ImportOption",
    "deepep_profile",
    "merge",
    "nccl_tests_profile",
]
