"""The command `import launch`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from megatron_launches import MIXTRAL

from moesim.simulator.scenario import load_scenario

BASE = "mixtral-8x7b-64xh100"


def script(folder: Path, *added: str) -> str:
    """A launch script on 16 nodes with Mixtral's arguments and others; returns its path."""
    path = folder / "run.sh"
    lines = " \\\n  ".join([*MIXTRAL.strip().splitlines(), *added])
    path.write_text(
        "#!/bin/bash\nNNODES=16\n"
        f"torchrun --nproc_per_node 8 --nnodes $NNODES pretrain_gpt.py \\\n  {lines}\n"
    )
    return str(path)


def test_the_table_says_what_every_argument_means(run: Callable[..., Any], tmp_path: Path) -> None:
    path = script(tmp_path, "--no-overlap-p2p-communication", "--pipeline-model-parallel-size ${PP:-4}")
    out = run("import", "launch", path, "--base", BASE, "-o", "mine.yaml")
    assert out.code == 0, out.err
    lines = out.out.splitlines()
    assert lines[0] == f"what run.sh says, with {BASE} as the base"
    assert lines[1].split() == ["argument", "value", "meaning", "place"]
    for text in (
        "parallel.pp = 4",
        "parallel.cp = 1; Megatron-LM's default",
        "irrelevant: Turns text into tokens",
        "not priced: the real step is slower",
        "from the base: vocab = 32000",
        "cluster.nodes = 16",
        "run.sh, line 4",
    ):
        assert text in out.out, text
    mine = load_scenario(str(tmp_path / "mine.yaml"))
    assert (mine.machine.n_gpus, mine.parallel.pp, mine.parallel.ep, mine.model) == (
        128,
        4,
        8,
        "mixtral-8x7b",
    )
    simulated = run("simulate", "mine.yaml", "--json")
    assert simulated.code == 0 and json.loads(simulated.out)["step"]["time_s"] > 0
    again = run("import", "launch", path, "--base", BASE, "-o", "mine.yaml")
    assert again.code == 2 and "--force" in again.err


def test_variables_come_from_the_command_line(run: Callable[..., Any], tmp_path: Path) -> None:
    path = script(tmp_path, "--num-layers-per-virtual-pipeline-stage $LAYERS")
    refused = run("import", "launch", path, "--base", BASE)
    assert refused.code == 2 and "--env LAYERS=VALUE" in refused.err and "Traceback" not in refused.err
    out = run("import", "launch", path, "--base", BASE, "--env", "LAYERS=2", "--json")
    assert out.code == 0, out.err
    data = json.loads(out.out)
    assert data["keys"]["parallel.vpp"] == 4 and data["scenario"]["schedule"] == "interleaved-1f1b"
    assert {"argument", "value", "kind", "meaning", "place"} == set(data["arguments"][0])


def test_the_former_name_still_works(run: Callable[..., Any], tmp_path: Path) -> None:
    assert run("import", "megatron", script(tmp_path), "--base", BASE).code == 0


@pytest.mark.parametrize(
    ("added", "options", "named"),
    [
        ("--fancy 3", [], "--fancy"),
        ("--fp16", [], "contradict"),
        ("", ["--env", "TP"], "NAME=VALUE"),
        ("", ["--vocab-size", "0"], "--vocab-size"),
        ("", ["--ignore", "--no-such"], "--no-such"),
        ("", ["-o", "no/such/folder.yaml"], "no/such"),
    ],
)
def test_refusals_are_one_paragraph(
    run: Callable[..., Any], tmp_path: Path, added: str, options: list[str], named: str
) -> None:
    out = run("import", "launch", script(tmp_path, added), "--base", BASE, *options)
    assert out.code == 2
    assert named in out.err and "Traceback" not in out.err
    assert len(out.err.strip().splitlines()) == 1


def test_an_argument_is_skipped_and_the_vocabulary_stated(run: Callable[..., Any], tmp_path: Path) -> None:
    path = script(tmp_path, "--fancy 3")
    out = run("import", "launch", path, "--base", BASE, "--ignore", "--fancy", "--vocab-size", "40000")
    assert out.code == 0, out.err
    assert "you said so" in out.out and "vocab 40000" in out.out


def test_a_base_needs_no_plan_where_the_file_states_it(run: Callable[..., Any], tmp_path: Path) -> None:
    whole = load_scenario(BASE).to_dict()
    plan = whole.pop("parallel")
    (tmp_path / "base.yaml").write_text(json.dumps(whole))
    (tmp_path / "with_plan.yaml").write_text(json.dumps({**whole, "parallel": plan}))
    path = script(tmp_path)
    bare, full = (
        run("import", "launch", path, "--base", base, "--json") for base in ("base.yaml", "with_plan.yaml")
    )
    assert bare.code == 0, bare.err
    assert json.loads(bare.out)["scenario"] == json.loads(full.out)["scenario"]
    assert run("simulate", "base.yaml").code == 2, "a scenario still needs its plan"
    text = Path(path).read_text()
    Path(path).write_text("".join(line for line in text.splitlines(True) if "micro-batch-size" not in line))
    refused = run("import", "launch", path, "--base", "base.yaml")
    assert refused.code == 2 and "--micro-batch-size is missing, and the base states no" in refused.err


def test_stand_ins_are_written_and_what_they_note_is_imported(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    path = script(tmp_path)
    written = run("import", "launch", "--capture", "stand-ins")
    assert written.code == 0 and "PATH=" in written.out and "moesim import launch stand-ins" in written.out
    settings = {"PATH": f"{tmp_path / 'stand-ins'}:/usr/bin:/bin"}
    subprocess.run(["bash", path], cwd=tmp_path, env=settings, check=True, capture_output=True)
    direct, noted = (run("import", "launch", one, "--base", BASE, "--json") for one in (path, "stand-ins"))
    assert noted.code == 0, noted.err
    assert json.loads(noted.out)["keys"] == json.loads(direct.out)["keys"]
    both = run("import", "launch", path, "--capture", "stand-ins")
    assert both.code == 2 and "reads nothing" in both.err
    assert run("import", "launch").code == 2


def test_unknown_arguments_are_passed_over_and_a_run_is_chosen(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    path = script(tmp_path, "--fancy 3")
    Path(path).write_text(Path(path).read_text() + Path(path).read_text().replace("NNODES=16", "NNODES=8"))
    several = run("import", "launch", path, "--base", BASE)
    assert several.code == 2 and "--run 2: run.sh, line" in several.err
    out = run("import", "launch", path, "--base", BASE, "--run", "2", "--ignore-unknown")
    assert out.code == 0 and "passed over by --ignore-unknown" in out.out and "--fancy" in out.out
