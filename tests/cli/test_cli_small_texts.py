"""Names of imported models, notes on schedules, and the dialect and descriptions of the JSON schemas."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moesim.hwmodels.errors import InputError
from moesim.simulator.model.huggingface import import_hf

Run = Callable[..., Any]
CONFIG = Path(__file__).parents[1] / "golden" / "models" / "mixtral-8x7b-v0.1.json"


def config_in(folder: Path, **more: str) -> Path:
    folder.mkdir(parents=True)
    data = {key: value for key, value in json.loads(CONFIG.read_text()).items() if key != "_name_or_path"}
    (folder / "config.json").write_text(json.dumps(data | more))
    return folder / "config.json"


def test_a_model_is_not_named_after_the_folder_of_its_config(tmp_path: Path) -> None:
    assert import_hf(config_in(tmp_path / "Downloads")).shape.name == "mixtral-46.7b"
    stated = config_in(tmp_path / "a", _name_or_path="mistralai/Mixtral-8x7B-v0.1")
    assert import_hf(stated).shape.name == "Mixtral-8x7B-v0.1"
    assert import_hf(config_in(tmp_path / "b", _name_or_path="/data/$(x)")).shape.name == "mixtral-46.7b"
    cached = tmp_path / "models--mistralai--Mixtral-8x7B" / "snapshots" / "0a1b"
    assert import_hf(config_in(cached)).shape.name == "Mixtral-8x7B"
    assert import_hf(CONFIG).shape.name == CONFIG.stem


def test_the_name_of_a_model_may_be_given(run: Run, tmp_path: Path) -> None:
    path = config_in(tmp_path / "x")
    shown = run("import", "hf", str(path), "--name", "mine", "-o", "mine.yaml")
    assert shown.code == 0 and shown.out.startswith("mine: ")
    assert "name: mine" in (tmp_path / "mine.yaml").read_text()
    with pytest.raises(InputError, match="letters, digits"):
        import_hf(path, "a b\n")


def test_a_csv_that_pytorch_refuses_says_so(run: Run) -> None:
    sizes = ("--pp", "4", "--microbatches", "8", "--format", "csv")
    both = run("schedule", "dualpipe", *sizes)
    assert both.code == 0 and "refuses this CSV: dualpipe" in both.err and "refuses" not in both.out
    assert run("schedule", "dualpipev", *sizes).err == ""
    assert run("schedule", "dualpipe", *sizes[:4]).err == "", "a drawing is not given to PyTorch"


@pytest.mark.parametrize("what", ["scenario", "result"])
def test_a_schema_states_its_dialect_and_describes_every_key(run: Run, what: str) -> None:
    schema = json.loads(run("schema", what).out)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert [key for key, value in schema["properties"].items() if not value.get("description")] == []


def test_ctrl_c_ends_the_process_without_freeing_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from moesim.cli import root

    def stopped(**_: object) -> None:
        raise KeyboardInterrupt

    codes: list[int] = []
    monkeypatch.setattr(root, "app", stopped)
    monkeypatch.setattr(root, "_start_quickly", lambda: None)
    monkeypatch.setattr("os._exit", codes.append)
    for arguments in (None, ["simulate"]):  # a console script, and a caller inside a process that goes on
        with pytest.raises(SystemExit) as end:
            root.main(arguments)
        assert end.value.code == root.INTERRUPTED
    assert codes == [root.INTERRUPTED]
