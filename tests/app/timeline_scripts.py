"""Runs the scripts of the timeline's component in Node.js, the one reader besides a browser."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

FRONTEND = Path(__file__).resolve().parents[2] / "app" / "components" / "timeline" / "frontend"

NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="Node.js is not installed")


def run(folder: Path, script: str, *arguments: str) -> Any:
    """What a script prints as JSON; it may import the component's modules by their names."""
    assert NODE is not None
    for path in FRONTEND.glob("*.js"):
        shutil.copy(path, folder)
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "script.js").write_text(script)
    done = subprocess.run(
        [NODE, "script.js", *arguments], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
