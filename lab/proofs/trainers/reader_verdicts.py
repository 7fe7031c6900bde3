"""Hands exports to a reader and writes down what it says; for environments without moesim."""

from __future__ import annotations

import datetime
import hashlib
import json
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def judge(
    exports: Path,
    verdicts: Path,
    reader: str,
    versions: Mapping[str, str],
    is_own: Callable[[str], bool],
    read: Callable[[Path, dict[str, Any]], Mapping[str, Any]],
) -> None:
    """Read every export of the index that is the reader's own, and write the verdicts.

    `read(path, expected)` returns what the reader made of a file; every value must be the expected one. It
    raises whatever the reader raises.
    """
    rows = []
    for entry in json.loads((exports / "index.json").read_text()):
        if not is_own(entry["file"]):
            continue
        path, expected = exports / entry["file"], entry["expected"]
        row = {"file": entry["file"], "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        assert row["sha256"] == entry["sha256"], f"{path} is not the file of the index"
        try:
            understood = read(path, expected)
            wrong = {key: value for key, value in understood.items() if expected[key] != value}
            row |= {"verdict": "different", "found": wrong} if wrong else {"verdict": "accepted"}
            if "parameters" in understood:
                row["parameters"] = understood["parameters"]
        except Exception as error:
            row |= {"verdict": "refused", "reason": f"{type(error).__name__}: {error}"[:400]}
        print(row["file"], row["verdict"], row.get("reason", row.get("found", "")), flush=True)
        rows.append(row)
    document = {
        "reader": reader,
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "versions": dict(versions),
        "exports": rows,
    }
    verdicts.write_text(json.dumps(document, indent=1) + "\n")
