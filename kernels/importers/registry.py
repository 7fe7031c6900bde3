"""Every importer of measurements: a new one is its file and one line here."""

from __future__ import annotations

from collections.abc import Mapping

from moesim.hwmodels.validation import registry
from moesim.kernels.importers.common import CalibrationImporter
from moesim.kernels.importers.deepep import DEEPEP
from moesim.kernels.importers.nccl_tests import NCCL_TESTS

CALIBRATION_IMPORTERS: Mapping[str, CalibrationImporter] = registry(
    NCCL_TESTS,
    DEEPEP,
)
"""Importers by name; the command line has a command `moesim import NAME` for each."""
