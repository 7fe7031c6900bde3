"""Reads recorded expert counts from untrusted CSV, NumPy or JSON files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from moesim.hwmodels.arrays import FloatArray
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.files import check_readable
from moesim.hwmodels.yaml_io import load_mapping

MAX_BYTES = 16_000_000
"""Largest file; 61 layers of 256 experts over a hundred steps fit in any format. Parsed, the numbers take up
to 16 times as much memory."""
MAX_NUMBERS = 2_100_000
"""Most numbers in a JSON file, as many as `MAX_BYTES` leaves room for."""
MAX_LINES = 20_000
MAX_EXPERTS = 10_000
"""Most lines of a CSV file (rows of a JSON list), and most counts in a line or row."""


def read_counts(path: Path) -> FloatArray:
    """Read the counts of a file as floats [layers, experts] or [steps, layers, experts].

    A `.csv` file has one line per layer, with numbers separated by commas; `#` starts a comment. A `.npy`
    file holds an array of integers or floats with 1 to 3 dimensions, a `.json` file the mapping
    `{"counts": [[...], ...]}`. Raises InputError, naming the file and where possible the line, for a file
    that is missing, too large, empty, ragged, or not of the type that its name says.
    """
    name = str(path)
    readers = {".csv": _read_csv, ".npy": _read_npy, ".json": _read_json}
    if path.suffix.lower() not in readers:
        raise InputError(f"{name}: unknown file type {path.suffix!r}; use {', '.join(readers)}")
    check_readable(path)
    try:
        if not path.is_file():
            raise InputError(f"{name}: No such file" if not path.exists() else f"{name}: is not a file")
        size = path.stat().st_size
    except (OSError, ValueError) as error:
        raise InputError(f"{name}: cannot be read: {error}") from None
    if size > MAX_BYTES:
        raise InputError(
            f"{name}: {size / 1e6:.0f} MB is above the limit of {MAX_BYTES // 10**6} MB; sum the counts over "
            "steps or tokens first"
        )
    try:
        return readers[path.suffix.lower()](path)
    except OSError as error:
        raise InputError(f"{name}: cannot be read: {error.strerror or error}") from None


def _read_csv(path: Path) -> FloatArray:
    rows: list[list[float]] = []
    try:
        lines = path.read_text("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not a text file (byte {error.start} is not UTF-8)") from None
    if len(lines) > MAX_LINES:
        raise InputError(f"{path}: {len(lines):,} lines, but a file holds at most {MAX_LINES:,} layers")
    for number, line in enumerate(lines, start=1):
        text = line.split("#")[0].strip()
        if not text:
            continue
        cells = text.split(",")
        if len(cells) > MAX_EXPERTS:
            raise InputError(
                f"{path}: line {number} has {len(cells):,} counts, above the limit {MAX_EXPERTS:,}"
            )
        try:
            rows.append([float(cell) for cell in cells])
        except ValueError:
            wrong = next(cell for cell in cells if not _is_number(cell))
            raise InputError(
                f"{path}: line {number}: {wrong.strip()[:40]!r} is not a number; a line holds the counts of "
                "one layer, separated by commas, without headings"
            ) from None
        if len(rows[-1]) != len(rows[0]):
            raise InputError(
                f"{path}: line {number} has {len(rows[-1])} counts, the first layer has {len(rows[0])}; "
                "every layer needs one count an expert"
            )
    if not rows:
        raise InputError(f"{path}: the file is empty; a line of counts for each layer is expected")
    return np.array(rows)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _read_npy(path: Path) -> FloatArray:
    try:
        # Memory-mapped, so that a header that claims more than the file holds fails before any allocation.
        array: Any = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError:
        raise
    except Exception as error:  # NumPy parses the header as Python text, so tokenize, struct and others raise
        raise InputError(
            f"{path}: not a NumPy array file ({' '.join(str(error).split())[:120]}); write it with numpy.save"
        ) from None
    if not isinstance(array, np.ndarray):
        array.close()
        raise InputError(f"{path}: an archive of arrays, not one array; write the counts with numpy.save")
    if array.dtype.kind not in "iuf":
        raise InputError(f"{path}: an array of {array.dtype}, but counts are integers or floats")
    if not 1 <= array.ndim <= 3 or not array.size:
        raise InputError(
            f"{path}: shape {array.shape} is not [experts], [layers, experts] or [steps, layers, experts]"
        )
    return np.array(array, dtype=np.float64)


def _read_json(path: Path) -> FloatArray:
    counts = load_mapping(path, MAX_NUMBERS).get("counts")
    if not isinstance(counts, list) or not counts:
        raise InputError(f'{path}: the key counts is missing or empty; write {{"counts": [[...], ...]}}')
    return np.array(_nested(counts, str(path), "counts", 0), dtype=np.float64)


def _nested(values: list[Any], name: str, where: str, depth: int) -> list[Any]:
    """Return nested lists of floats after checking that they are regular and at most three levels deep."""
    if depth > 2:
        raise InputError(f"{name}: {where} is nested deeper than [steps][layers][experts]")
    most = MAX_LINES if any(isinstance(value, list) for value in values[:1]) else MAX_EXPERTS
    if len(values) > most:
        raise InputError(f"{name}: {where} holds {len(values):,} entries, above the limit {most:,}")
    lists = [isinstance(value, list) for value in values]
    if not any(lists):
        for index, value in enumerate(values):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise InputError(f"{name}: {where}.{index}={repr(value)[:40]} is not a number")
        return [float(value) for value in values]
    if not all(lists):
        raise InputError(f"{name}: {where} mixes numbers and lists")
    inner = [_nested(value, name, f"{where}.{index}", depth + 1) for index, value in enumerate(values)]
    shapes = {np.shape(value) for value in inner}
    if len(shapes) > 1 or (0,) in shapes:
        raise InputError(
            f"{name}: {where} holds rows of {', '.join(map(str, sorted(shapes)))} counts; all must be equal"
        )
    return inner
