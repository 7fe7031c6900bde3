"""moesim topology and moesim import topology, and what the command line lists of the registries."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moesim.hwmodels import load_cluster
from moesim.hwmodels.importers.topology import MACHINE_FORMS
from moesim.hwmodels.topologies.registry import SCALE_OUT, SCALE_UP
from moesim.kernels.importers import CALIBRATION_IMPORTERS
from moesim.simulator.model.huggingface import FAMILIES

Run = Callable[..., Any]
EDGES = "gpu:0 s0 100GB/s 1us\ngpu:1 s0 100GB/s\n"


def test_the_published_table_is_printed_with_errors(run: Run) -> None:
    code, out, err = run("topology")
    assert code == 0 and err == ""
    assert (
        "arXiv 2505.09343" in out and out.count(" %") >= 25 and "$36,000" in out.replace("$36000", "$36,000")
    )
    cells = json.loads(run("topology", "--json").out)
    assert len(cells) == 25
    assert {c["figure"] for c in cells if c["relative_error"]} == {"cost_musd", "cost_kusd_per_endpoint"}


def test_a_cluster_is_counted(run: Run) -> None:
    facts = json.loads(run("topology", "deepseek-h800-2048", "--json").out)
    assert facts["switches"] == {"nvswitch": 256, "leaf": 64, "spine": 32}
    assert facts["inter_switch_links"] == facts["endpoints"] == 2048
    assert facts["usd_per_endpoint"] == pytest.approx(4247.5)
    assert facts["longest_route_links"] == 6
    text = run("topology", "deepseek-h800-2048").out
    assert "leaf-spine" in text and "$3,456,000" in text


def test_a_network_needs_its_nodes(run: Run) -> None:
    facts = json.loads(run("topology", "dragonfly-ib-400g", "--nodes", "128", "--json").out)
    assert facts["gpus"] == 1024 and facts["switches"]["router"] == 64
    code, out, err = run("topology", "dragonfly-ib-400g")
    assert (code, out) == (2, "") and "--nodes 256" in err
    code, out, err = run("topology", "dragonfly")
    assert code == 2 and "nearest: 'dragonfly-ib-400g'" in err


def test_an_import_becomes_a_cluster(run: Run, tmp_path: Path) -> None:
    (tmp_path / "edges.txt").write_text(EDGES)
    code, out, err = run("import", "topology", "edges.txt", "--like", "hgx-h200", "-o", "mine.yaml")
    assert code == 0 and "understood: edge list: 2 links, 2 GPUs" in out and "wrote mine.yaml" in err
    assert load_cluster(str(tmp_path / "mine.yaml")).n_gpus == 2
    counted = json.loads(run("topology", "mine.yaml", "--json").out)
    assert counted["cables"] == {"edge": 2} and counted["cost_usd"] == {}
    again = run("import", "topology", "edges.txt", "--like", "hgx-h200", "-o", "mine.yaml")
    assert again.code == 2 and "--force" in again.err
    forced = run(
        "import", "topology", "edges.txt", "--like", "hgx-h200", "-o", "mine.yaml", "--force", "--json"
    )
    assert forced.code == 0 and json.loads(forced.out)["gpus"] == 2


@pytest.mark.parametrize(
    ("text", "extra", "words"),
    [
        (EDGES, ("-o", "mine.json"), "ends in .yaml"),
        (EDGES, ("-o", "no/mine.yaml"), "does not exist"),
        (EDGES, ("--nodes", "3"), "do not divide"),
        ('<!DOCTYPE a [<!ENTITY b "c">]><system/>', (), "document type"),
        ("gpu:0 gpu:1 0GB/s", (), "zero"),
        ("gpu:0 s 1GB/s\ngpu:1 t 1GB/s", (), "not connected"),
    ],
)
def test_bad_imports_end_in_one_paragraph(
    run: Run, tmp_path: Path, text: str, extra: tuple[str, ...], words: str
) -> None:
    (tmp_path / "bad.txt").write_text(text)
    before = sorted(tmp_path.iterdir())
    code, out, err = run("import", "topology", "bad.txt", "--like", "hgx-h200", *extra)
    assert code == 2 and out == "" and words in err
    assert err.startswith("moesim: error: ") and err.count("\n") == 1 and "Traceback" not in err
    assert sorted(tmp_path.iterdir()) == before


def test_kinds_are_those_of_the_registry(run: Run) -> None:
    listed = json.loads(run("topology", "--kinds", "--json").out)
    assert [row["kind"] for row in listed["scale_up"]] == list(SCALE_UP)
    assert [row["kind"] for row in listed["scale_out"]] == list(SCALE_OUT)
    shown = run("topology", "--kinds").out
    assert all(kind in shown for kind in (*SCALE_UP, *SCALE_OUT))
    assert "every network with a fabric also states link_bandwidth" in shown


def test_forms_of_files_are_those_of_the_registry(run: Run) -> None:
    code, out, _ = run("import", "topology", "--forms")
    assert code == 0 and out.splitlines()[:-1] == list(MACHINE_FORMS)
    assert "edge list" in out.splitlines()[-1]


def test_import_lists_model_families_and_importers(run: Run) -> None:
    assert run("import", "hf", "--families").out.split() == sorted(FAMILIES)
    out = run("import", "--help").out
    assert all(f"\n  {name} " in out for name in (*CALIBRATION_IMPORTERS, "launch", "topology", "hf"))


COUNTS = "8,2,1,1,1,1,1,1\n2,2,2,2,2,2,2,2\n"


@pytest.fixture(autouse=True)
def counts(tmp_path: Path) -> None:
    (tmp_path / "counts.csv").write_text(COUNTS)


def test_a_plan_for_people_and_programs(run: Run) -> None:
    shown = run("eplb", "counts.csv", "--ranks", "4", "--redundant", "4", "--top-k", "2")
    assert shown.code == 0 and shown.err == ""
    assert "2 layers, 8 experts, 4 ranks of 3 slots" in shown.out and "0x4" in shown.out
    told = json.loads(run("eplb", "counts.csv", "--ranks", "4", "--redundant", "4", "--json").out)
    hot, even = told["layers"]
    assert hot["before"] == pytest.approx(10 / 4) and hot["after"] < 1.3
    assert even["before"] == even["after"] == pytest.approx(1.0)
    assert sum(hot["replicas"]) == 12 and [len(row) for row in hot["experts_of_rank"]] == [3] * 4
    assert sorted(e for row in hot["experts_of_rank"] for e in row) == sorted(
        e for e, n in enumerate(hot["replicas"]) for _ in range(n)
    )


def test_hierarchical(run: Run) -> None:
    flags = ("--ranks", "4", "--policy", "hierarchical", "--groups", "4", "--nodes", "2", "--json")
    told = json.loads(run("eplb", "counts.csv", *flags).out)
    for row in told["layers"]:
        for first in (0, 2):
            groups = {e // 2 for rank in row["experts_of_rank"][first : first + 2] for e in rank}
            assert len(groups) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("counts.csv", "--ranks", "3"), "experts=8 cannot be shared evenly by ranks=3"),
        (("counts.csv", "--ranks", "4", "--redundant", "3"), "redundant_experts=3"),
        (("counts.csv", "--ranks", "4", "--policy", "globl"), "'global'"),
        (("counts.csv", "--ranks", "4", "--top-k", "3"), "not a multiple of top_k=3"),
        (("counts.csv", "--ranks", "4", "--policy", "hierarchical", "--groups", "3"), "groups=3"),
        (("absent.csv", "--ranks", "4"), "No such file"),
        (("bad.csv", "--ranks", "2"), "bad.csv: layer 1 sums to 3"),
    ],
)
def test_bad_input(run: Run, tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    (tmp_path / "bad.csv").write_text("1,1\n2,1\n")
    outcome = run("eplb", *arguments)
    assert outcome.code == 2 and outcome.out == "" and words in outcome.err
    assert outcome.err.startswith("moesim: error: ") and outcome.err.count("\n") == 1
