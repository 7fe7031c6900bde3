"""Writes rows to disk as they are measured, so that an interrupted run can be resumed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moesim.hwmodels.errors import InputError
from moesim.kernels.calibrate.protocol import TimedRow

FORMAT = 1
MAX_BYTES = 64_000_000


class Journal:
    """An append-only JSONL file with a header line (the machine), one line per row, and an end line.

    Each line is flushed to disk before the next task begins. A line that a crash cut off is dropped. A
    finished journal is renamed to `<name>.previous` and a new one is begun.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        """Open or begin a journal; raises InputError for another machine's file or one that is no journal."""
        self.path = path
        self.header = {"format": FORMAT, **header}
        self.rows: dict[str, TimedRow] = {}
        if path.exists() and self._read():
            return
        text = json.dumps({"header": self.header}) + "\n"
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise InputError(
                f"{path}: cannot write there: {error.strerror or error}; choose an existing, writable folder"
            ) from None

    @property
    def resumed(self) -> int:
        """Number of rows that an earlier, interrupted run left."""
        return len(self.rows)

    def append(self, row: TimedRow) -> None:
        """Write a row to disk."""
        self._write(row.to_json())
        self.rows[row.task.key] = row

    def finish(self) -> None:
        """Mark the run as complete."""
        self._write(json.dumps({"finished": True}))

    def _write(self, line: str) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _read(self) -> bool:
        """Load the file; return whether it holds an unfinished run of this machine."""
        data = self.path.read_bytes()
        if len(data) > MAX_BYTES:
            raise InputError(f"{self.path}: larger than {MAX_BYTES // 10**6} MB, so not a calibration's rows")
        whole = data[: data.rfind(b"\n") + 1]
        lines = whole.decode("utf-8", errors="replace").splitlines()
        if not lines:
            return False
        header = _object(lines[0], self.path, 1).get("header")
        if not isinstance(header, dict):
            raise InputError(
                f"{self.path}: not the rows of a calibration; choose another output, or remove the file"
            )
        finished = False
        for number, line in enumerate(lines[1:], 2):
            item = _object(line, self.path, number)
            finished = "finished" in item
            if not finished:
                row = TimedRow.from_json(item, f"{self.path}, line {number}")
                self.rows[row.task.key] = row
        if finished:
            self.rows.clear()
            self.path.replace(self.path.with_name(self.path.name + ".previous"))
            return False
        self._same_machine(header)
        if len(whole) < len(data):  # the last line was cut off: truncate the file after the last whole one
            os.truncate(self.path, len(whole))
        return True

    def _same_machine(self, header: Mapping[str, Any]) -> None:
        now = json.loads(json.dumps(self.header))
        changed = sorted(k for k in now.keys() | header.keys() if now.get(k) != header.get(k))
        if changed:
            first = changed[0]
            raise InputError(
                f"{self.path}: an interrupted run of other conditions ({first} was {header.get(first)!r}, "
                f"is {now.get(first)!r}) cannot be resumed; remove the file, or choose another output"
            )


def _object(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        item = json.loads(line)
    except ValueError:
        item = None
    if not isinstance(item, dict):
        raise InputError(f"{path}, line {number}: not a row of a calibration; remove the file to begin again")
    return item
