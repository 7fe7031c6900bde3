"""Figures that docs/model.md and its chapters work out for the home case are those of the code."""

from __future__ import annotations

import csv
import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from moesim.simulator.dispatchers.protocol import notify_seconds

if TYPE_CHECKING:
    from moesim.simulator.engine.records import Execution
    from moesim.simulator.predict.result import Result
    from moesim.simulator.predict.step import Prepared

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = (DOCS / "model.md", *sorted((DOCS / "model").glob("*.md")))
MS, US, GB, MB = 1e3, 1e6, 1e-9, 1e-6


@dataclass(frozen=True, repr=False)
class Home:
    """The home case, and shorthands for what the page speaks of."""

    prepared: Prepared
    execution: Execution
    result: Result

    def sync(self, part: str) -> float:
        """Seconds of a part of the end of the step on pipeline rank 1."""
        return float(getattr(self.prepared.program.costs.sync[1], part))

    def ring(self, experts: bool) -> float:
        """Seconds of the gradients' ring of rank 1: of its experts, or of the rest."""
        from moesim.simulator.cost.data_parallel import data_parallel

        pricer, blocks = self.prepared.pricer, 8
        dense, expert = pricer.block_parameters("moe")
        amounts = (0.0, 4.0 * blocks * expert) if experts else (4.0 * blocks * dense, 0.0)
        return data_parallel(pricer, "reduce_scatter", *amounts, copies=2).seconds

    def payload(self, phase: Any) -> float:
        """Seconds of an overlapped transfer of a MoE layer with even loads."""
        cost = self.prepared.program.costs.transfer["moe", phase, "overlapped"]
        return max(cost.nic_s, cost.scale_up_s)

    def passes(self, kind: Any) -> float:
        """Seconds of compute of one block, forward and backward."""
        from moesim.simulator.cost.end_of_step import pass_seconds

        return sum(pass_seconds(self.prepared.pricer, kind))

    def rank(self, part: str) -> float:
        """Bytes of a kind on pipeline rank 1."""
        return float(self.prepared.memory_by_rank.by_rank[1].by_kind()[part])


def counts(home: Home) -> tuple[float, ...]:
    from moesim.simulator.model.counts import parameters_activated, parameters_total

    shape = home.prepared.shape
    return (
        shape.layers[0].attention.parameters(shape.hidden) / 1e6,
        parameters_total(shape) / 1e9,
        parameters_activated(shape, embedding=True) / 1e9,
        parameters_activated(shape, embedding=False) / 1e9,
    )


def flop(home: Home) -> tuple[float, ...]:
    from moesim.simulator.model.counts import attention_flop_per_token, flop_per_token

    shape = home.prepared.shape
    return (
        attention_flop_per_token(shape, 4096, False) / 1e9,
        flop_per_token(shape, 4096, False) / 1e9,
        flop_per_token(shape, 4096, True) / 1e9,
    )


def buffers(home: Home) -> tuple[float, ...]:
    from moesim.simulator.dispatchers.protocol import Call
    from moesim.simulator.dispatchers.registry import dispatcher

    kind = dispatcher(home.prepared.scenario.communication.kernels)
    found = kind.buffers(Call(64, 8, 20, row=home.prepared.shape.hidden))
    return found.nvlink_bytes * MB, found.rdma_bytes * MB


def plan_bounds(home: Home) -> tuple[float, ...]:
    import moesim

    space = moesim.PlanSpace(
        tp=(1,), pp=(16,), ep=(64,), cp=(1,), microbatch=(1,), zero_stage=(1,), schedule=("dualpipe",),
        recompute=("deepseek-v3",), precision=("fp8",), sms=(20,),
    )  # fmt: skip
    row = moesim.plan(home.prepared.scenario, space, top=1, headroom=0.0).best
    assert row.lower_bound_s is not None and row.closed_form_s is not None
    return row.lower_bound_s, row.closed_form_s, row.time_s


FIGURES: list[tuple[str, Callable[[Home], tuple[float, ...]]]] = [
    ("= {:.1f} M;", lambda h: counts(h)[:1]),
    ("is **{:.2f} B**; with 8 of 256 experts **{:.2f} B** activated with the embedding table and **{:.2f}",
     lambda h: counts(h)[1:]),
    ("(192 + 128) = {:.2f} GF non-causal", lambda h: flop(h)[:1]),
    ("**φ = {:.1f} GF non-causal, {:.1f} GF causal**", lambda h: flop(h)[1:]),
    ("with three launch gaps {:.2f} ms.", lambda h: (h.sync("optimizer_s") * MS,)),
    ("Home case: {:.2f} nodes and {:.2f} GPUs a token",
     lambda h: (h.prepared.pricer.targets().distinct_nodes, h.prepared.pricer.targets().distinct_gpus)),
    ("226.7 MB / (361.6 GB/s) = 0.627 ms | 2.627 · 1.07 = **{:.3f} ms**",
     lambda h: (h.payload("dispatch F") * MS,)),
    ("5.095 · 1.07 = **{:.3f} ms**", lambda h: (h.payload("combine F") * MS,)),
    ("2 (3.33 + 3.7) = {:.1f} us", lambda h: (notify_seconds(h.prepared.pricer.links, 8) * US,)),
    ("A dispatch takes another {:.0f} us a call, and a combine {:.0f} us.",
     lambda h: tuple(
         (h.prepared.program.costs.transfer["moe", phase, "overlapped"].launch_s
          - notify_seconds(h.prepared.pricer.links, 8)) * US
         for phase in ("dispatch F", "combine F"))),
    ("+ 3.7 us = {:.3f} ms", lambda h: (h.prepared.program.costs.send_s * MS,)),
    ("embedding {:.2f}, dense layer {:.1f}, MoE layer {:.1f}, MTP module {:.1f}, head pass {:.1f} (twice",
     lambda h: tuple(h.passes(kind) * MS for kind in ("embedding", "dense", "moe", "mtp", "head"))),
    ("Dense: 8 · 233.0 M · 4 B = 7.46 GB over 256 replicas, {:.1f} ms.", lambda h: (h.ring(False) * MS,)),
    ("over 4 replicas, {:.1f} ms. Together {:.1f} ms,",
     lambda h: (h.ring(True) * MS, h.sync("reduce_s") * MS)),
    ("parameters in BF16 {:.1f} ms.", lambda h: (h.sync("gather_s") * MS,)),
    ("t_norm = 6.8 + 14 · 0.6 + 16 · 5 = {:.1f} us", lambda h: (h.sync("norm_s") * US,)),
    ("weights {:.2f} GB in BF16, gradients {:.2f} GB in FP32",
     lambda h: (h.rank("weights") * GB, h.rank("gradients") * GB)),
    ("(4 + 2 · 2) B = {:.2f} GB", lambda h: (h.rank("optimizer") * GB,)),
    ("17 · 4 · 4096 · 156,224 = {:.1f} GB", lambda h: (h.rank("activations") * GB,)),
    ("{:.1f} MB and {:.1f} MB at EP64 with 20 SMs", buffers),
    ("Home case: lower bound {:.2f} s, closed form {:.2f} s, engine {:.2f} s.", plan_bounds),
]  # fmt: skip
"""Words of the page with the figures left out, and the figures from the code."""


@pytest.fixture(scope="module")
def home(home_case: tuple[Any, Any, Any]) -> Home:
    return Home(*home_case)


@pytest.fixture(scope="module")
def page() -> str:
    return " ".join(" ".join(page.read_text("utf-8") for page in PAGES).split())


@pytest.mark.parametrize(("words", "figures"), FIGURES, ids=[words[:40] for words, _ in FIGURES])
def test_a_worked_figure_is_that_of_the_code(
    words: str, figures: Callable[[Home], tuple[float, ...]], home: Home, page: str
) -> None:
    expected = words.format(*figures(home))
    assert expected in page, f"docs/model/ should say: {expected}"


def test_the_best_plans_of_the_planner_page_take_as_long_as_it_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The searches take minutes (make scoreboard); the plans that they found are simulated again here."""
    import moesim

    planner_page = importlib.import_module("lab.writers.planner_page")

    shown = planner_page.simulated_on((DOCS / "planner.md").read_text("utf-8"))
    assert len(shown) == 3
    for seconds, overrides in shown:
        assert f"{moesim.simulate(planner_page.HOME, *overrides).step.time_s:.2f}" == f"{seconds:.2f}"


ROOT = DOCS.parent


def test_pages_describe_every_package_and_every_view() -> None:
    from moesim.app.pages import PAGES as VIEWS

    packages = [path.parent.name for path in (ROOT / "simulator").glob("*/__init__.py")]
    rows = re.findall(r"^\| `(\w+)` \|", (DOCS / "structure.md").read_text("utf-8"), re.MULTILINE)
    assert set(packages) <= set(rows), "docs/structure.md describes every package"
    dashboard = (DOCS / "dashboard.md").read_text("utf-8")
    assert [title for _, title, _ in VIEWS if f"**{title}**" not in dashboard] == []


def test_the_readme_states_the_errors_of_the_scoreboard_beside_the_home_case() -> None:
    from moesim.simulator.scoring.scoreboard.rows import kept_board

    text = (ROOT / "README.md").read_text("utf-8")
    for name, noun in (("MoE", "MoE models"), ("dense", "dense models")):
        score = kept_board().named(name)
        assert f"{score.rows} of {noun}" in text and f"{score.median_absolute_error:.1%}" in text


def test_the_home_search_has_over_a_million_plans() -> None:
    from moesim.simulator.planner.space import PlanSpace, with_defaults
    from moesim.simulator.scenario import load_scenario

    home = load_scenario("deepseek-v3-2048xh800")
    assert with_defaults(PlanSpace(), home, home.shape, home.machine).size > 1_000_000
    for page in (ROOT / "README.md", DOCS / "commands.md"):
        assert "over a million" in page.read_text("utf-8")


def test_no_test_asserts_a_wall_time() -> None:
    clock = re.compile(r"^\s*assert .*(?:perf_counter|time\.time\(\))", re.MULTILINE)
    said = [path.name for path in (ROOT / "tests").rglob("*.py") if clock.search(path.read_text("utf-8"))]
    assert said == []


def test_the_comparison_states_other_tools_figures_as_they_were_read() -> None:
    """Every figure of a peer on docs/comparison.md is a line of lab/docs/peers.csv with its source."""
    page = " ".join((DOCS / "comparison.md").read_text("utf-8").split())
    with (ROOT / "lab" / "docs" / "peers.csv").open(encoding="utf-8") as file:
        facts = list(csv.DictReader(file))
    assert all(fact["source"] and fact["date"] for fact in facts)
    assert [fact["words"] for fact in facts if fact["words"] not in page] == []
    for fact in facts:
        page = page.replace(fact["words"], "")
    assert re.findall(r"[+-]?\d[\d.]* (?:s|%)(?![\w])", page) == []


def test_the_defaults_of_the_scenario_page_are_those_of_the_rules() -> None:
    from moesim.simulator.scenario import load_scenario

    chosen = {one.key: one for one in load_scenario(str(ROOT / "examples" / "five-lines.yaml")).defaults}
    page = (DOCS / "scenario.md").read_text("utf-8")
    for key in ("routing.expert_load_cv", "variation.clock_cv", "variation.jitter_cv"):
        assert f"| `{key}` | {chosen[key].value}" in page, key
