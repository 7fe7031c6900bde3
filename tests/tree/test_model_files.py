"""The writer of the shipped models writes them from their published configurations."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WRITER = ROOT / "lab" / "writers" / "model_files.py"
GOLDEN = ROOT / "tests" / "golden" / "models"
MODELS = ROOT / "simulator" / "data" / "models"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(WRITER), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def configs(tmp_path: Path) -> Path:
    """Two of the configurations, under the names of the list."""
    for config, golden in (
        ("Qwen--Qwen3-8B_config.json", "qwen3-8b.json"),
        ("deepseek-ai--DeepSeek-V3.2.json", "deepseek-v3.2.json"),
    ):
        (tmp_path / config).write_bytes((GOLDEN / golden).read_bytes())
    return tmp_path


def test_shipped_models_are_what_their_configurations_say(configs: Path) -> None:
    checked = run(str(configs), "--check")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "not current: nothing" in checked.stdout
    missing = [line for line in checked.stdout.splitlines() if "in these folders" in line]
    assert len(missing) == len(list(MODELS.glob("*.yaml"))) - 2 - 12  # twelve were written by hand


def test_another_configuration_is_noticed(configs: Path) -> None:
    path = configs / "Qwen--Qwen3-8B_config.json"
    path.write_text(path.read_text().replace('"num_hidden_layers": 36', '"num_hidden_layers": 37'))
    checked = run(str(configs), "--check")
    assert checked.returncode == 1 and "not current: qwen3-8b" in checked.stdout
    path.write_text('{"model_type": "gpt_of_nobody"}')
    refused = run(str(configs), "--check")
    assert refused.returncode == 1 and "qwen3-8b:" in refused.stderr and "gpt_of_nobody" in refused.stderr
