"""Writes the shipped models from published configurations, as lab/writers/model_files.csv lists them.

    python -m lab.writers.model_files CONFIGS... [--check]

`CONFIGS` are folders with the files `<config>.json` or `<config>_config.json`; they are not part of the
repository. `--check` exits with 1 where a shipped model is not what its configuration says. Models without a
row in the list were written by hand.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, RootModel

from moesim.hwmodels.errors import MoesimError
from moesim.hwmodels.yaml_io import dump_mapping
from moesim.simulator.model.huggingface import import_hf
from moesim.simulator.model.shape import ShapeSource

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("model_files.csv")
MODELS = ROOT / "simulator" / "data" / "models"
SHORT = {"aic": "aic-core/src/aiconfigurator_core/model_configs of ai-dynamo/aiconfigurator@095f58a51"}
"""Sources that many rows name, by their short names in the list."""


class ModelFile(NamedTuple):
    """One row of the list."""

    name: str
    config: str
    repository: str
    read_at: str
    date: str


def listed() -> list[ModelFile]:
    """The rows of the list."""
    with LIST.open(encoding="utf-8", newline="") as file:
        return [ModelFile(**row) for row in csv.DictReader(file)]


def text_of(row: ModelFile, config: Path) -> str:
    """The model file of a row; raises InputError where its configuration cannot be imported."""
    shape = import_hf(config, row.name).shape
    where = SHORT.get(row.read_at, row.read_at)
    reference = f"{row.repository} config.json on Hugging Face, read in {where}"
    source = ShapeSource(kind="published", reference=reference, date=row.date)
    return dump_mapping(stated(shape.model_copy(update={"source": source})))


def stated(part: Any) -> Any:
    """A part of a shape as plain data, without the keys that have their defaults."""
    if isinstance(part, RootModel):
        return {name: stated(inner) for name, inner in part.root.items()}
    if isinstance(part, BaseModel):
        fields = {name: (getattr(part, name), field) for name, field in type(part).model_fields.items()}
        return {
            name: stated(value)
            for name, (value, field) in fields.items()
            if name == "kind" or field.is_required() or value != field.default
        }
    return list(part) if isinstance(part, tuple) else part


def found(row: ModelFile, folders: Sequence[Path]) -> Path | None:
    """The configuration of a row in one of the folders."""
    names = (f"{row.config}{ending}" for ending in ("_config.json", ".json"))
    paths = [folder / name for name in names for folder in folders]
    return next((path for path in paths if path.is_file()), None)


def main() -> None:
    """Write or check the files, and name the rows that have no configuration or cannot be imported."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("configs", nargs="+", type=Path)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    stale, failed = [], []
    for row in listed():
        config, target = found(row, options.configs), MODELS / f"{row.name}.yaml"
        if config is None:
            print(f"{row.name}: no {row.config}.json in these folders")
            continue
        try:
            text = text_of(row, config)
        except MoesimError as error:
            failed.append(f"{row.name}: {error}")
            continue
        if not target.is_file() or target.read_text("utf-8") != text:
            stale.append(row.name)
            if not options.check:
                target.write_text(text, "utf-8")
    print(f"{'not current' if options.check else 'written'}: {', '.join(stale) or 'nothing'}")
    for message in failed:
        print(message, file=sys.stderr)
    sys.exit(1 if failed or (options.check and stale) else 0)


if __name__ == "__main__":
    main()
