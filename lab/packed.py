"""Reads the measurements in `lab/results`, each packed by xz; `lab/results/README.md` lists them."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


def text(path: str | Path) -> str:
    """The text of a file, which is unpacked if its name ends in `.xz`."""
    held = Path(path).read_bytes()
    return (lzma.decompress(held) if Path(path).suffix == ".xz" else held).decode()


def read(name: str) -> Any:
    """What a result holds: JSON by the name that it has in `lab/results` without `.xz`."""
    return json.loads(text(RESULTS / f"{name}.xz"))
