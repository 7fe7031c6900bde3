"""Stands in for a launcher: notes its arguments, the variables and the files that they name, and stops.

`moesim import launch --capture DIR` copies this file into DIR, so it uses the standard library only.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

KEPT = ("MODEL", "MODEL_NAME", "WORLD_SIZE")
CONFIGURATIONS = (".json", ".yaml", ".yml", ".toml")
MOST_BYTES = 300_000


def noted(words: list[str]) -> dict[str, object]:
    """The words, the variables that they and these name, and the configuration files among them."""
    variables = {name: os.environ[name] for name in KEPT if name in os.environ}
    texts = list(words)
    for text in texts:
        for name in re.findall(r"\$\{?([A-Za-z_]\w*)", text):
            if name in os.environ and name not in variables:
                variables[name] = os.environ[name]
                texts.append(os.environ[name])
    files = {}
    for word in {part.partition("=")[2] or part for text in texts for part in text.split()}:
        path = Path(word)
        if word.endswith(CONFIGURATIONS) and path.is_file() and path.stat().st_size <= MOST_BYTES:
            files[word] = path.read_text("utf-8", errors="replace")
    return {"words": words, "environment": variables, "files": files}


def main() -> None:
    """Append one line to the file that is named first."""
    line = json.dumps(noted(sys.argv[2:])) + "\n"
    with Path(sys.argv[1]).open("a", encoding="utf-8") as file:
        file.write(line)
    sys.stderr.write(f"noted: {sys.argv[2]} with {len(sys.argv) - 3} arguments\n")


if __name__ == "__main__":
    main()
