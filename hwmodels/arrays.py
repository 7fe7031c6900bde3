"""NumPy array types that all packages share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


def distinct(values: IntArray) -> IntArray:
    """The values once each, in order (`np.unique` without counts imports `numpy.ma`: 10 ms)."""
    return np.unique(values, return_counts=True)[0]


if TYPE_CHECKING:

    class RecordArray(np.ndarray[Any, np.dtype[np.void]]):
        """A table of named columns, whose types only its dtype knows.

        To NumPy's stubs each column is an array of Any, for which mypy tries all overloads of any operation:
        it took a third of its time.
        """

        @overload  # type: ignore[override]
        def __getitem__(self, key: str, /) -> Any: ...
        @overload
        def __getitem__(self, key: Any, /) -> RecordArray: ...
        def __getitem__(self, key: Any, /) -> Any:
            """A column by its name, else some of the records."""

        def copy(self, order: Any = "C") -> RecordArray:
            """The same records in memory of their own."""

else:
    RecordArray = npt.NDArray[np.void]
