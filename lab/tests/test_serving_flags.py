"""Today's command lines of inference engines are those that the engines' parsers accepted."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "lab" / "proofs" / "serving"))
from exports import launches  # noqa: E402

VERDICTS = {
    row["reader"]: row for row in json.loads((ROOT / "lab/docs/proof/serving-flags.json").read_text("utf-8"))
}


@pytest.mark.parametrize(("engine", "readers"), [("vllm-0.19", 2), ("sglang-0.5", 2), ("trtllm-1.2", 1)])
def test_exports_of_today_were_accepted(engine: str, readers: int) -> None:
    judges = [row for reader, row in VERDICTS.items() if reader.startswith(engine.split("-")[0])]
    assert len(judges) == readers
    made = {row["name"]: [row["sha256"], "accepted"] for row in launches(engine)}
    for judge in judges:
        assert judge["verdicts"] == made, judge["reader"]
        assert "accepted" not in judge["controls"]
