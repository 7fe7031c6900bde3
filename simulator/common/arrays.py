"""Names of the NumPy types that cross modules."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

BoolVector = npt.NDArray[np.bool_]
IntVector = npt.NDArray[np.int64]
FloatVector = npt.NDArray[np.float64]
