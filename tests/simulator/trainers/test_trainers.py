"""Megatron-LM arguments out and in again, and the torchtitan snippet."""

from __future__ import annotations

import ast
import random
from contextlib import suppress
from pathlib import Path

import megatron_launches as launches
import pytest
from hypothesis import given
from hypothesis import strategies as st

import moesim
from moesim.hwmodels.errors import InputError
from moesim.simulator.scenario import Scenario, load_scenario
from moesim.simulator.schedules import SCHEDULES
from moesim.simulator.trainers.export import VARIABLES
from moesim.simulator.trainers.megatron.arguments import megatron_arguments
from moesim.simulator.trainers.megatron.layout import (
    expand_layout,
    frequency_text,
    layers_of_layout,
    layout_text,
    mtp_stage_of_layout,
    parse_frequency,
)
from moesim.simulator.trainers.torchtitan.export import torchtitan_snippet

HOME = "deepseek-v3-2048xh800"
LAYERS = (4,) * 15 + (1,)


def spellable(**changed: str) -> Scenario:
    keys = {
        "schedule": "1f1b",
        "recompute": "selective",
        "stages.layers": str(list(LAYERS)),
        "precision": "bf16",
        **changed,
    }
    scenario = load_scenario(HOME, [f"{key}={value}" for key, value in keys.items()])
    return moesim.trainer("megatron").adapted(scenario)[0]


def read_back(scenario: Scenario, folder: Path) -> Scenario:
    """The scenario that a script with the exported arguments of another one means."""
    export = megatron_arguments(scenario)
    script = folder / "run.sh"
    launch = (
        f'torchrun --nnodes {export.gpus // 8} --nproc-per-node 8 pretrain_gpt.py "${{TRAINING_ARGS[@]}}"\n'
    )
    script.write_text(export.text() + launch)
    return moesim.import_launch(script, HOME, environment=dict.fromkeys(VARIABLES, "1")).scenario


SAME = ("parallel", "schedule", "stages", "batch")
SPELLED = ("linear", "moments", "gradient_reduce", "gradients", "master_weights")
"""Fields of a precision recipe that the exported arguments express."""
MODULES = {"attention": ("core_attn",), "selective": ("layernorm", "mla_up_proj", "moe_act")}
"""Modules as which the export writes a policy."""


def check_round_trip(scenario: Scenario, folder: Path) -> None:
    again = read_back(scenario, folder)
    for key in SAME:
        assert getattr(again, key) == getattr(scenario, key), key
    expected = scenario.recompute
    assert again.recompute == (MODULES.get(expected, expected) if isinstance(expected, str) else expected)
    for field in SPELLED:
        assert getattr(again.recipe, field) == getattr(scenario.recipe, field), field
    if scenario.parallel.ep > 1:
        assert again.communication == scenario.communication


def _varied(count: int, seed: int) -> list[dict[str, str]]:
    """Overrides of plans that Megatron-LM has words for, of every dimension that it shares with a search."""
    draw = random.Random(seed)
    found: list[dict[str, str]] = []
    while len(found) < count:
        pp, vpp = draw.choice([(2, 1), (4, 1), (8, 1), (16, 1), (4, 2), (8, 2), (8, 4)])
        tp, cp = draw.choice([1, 2, 4, 8]), draw.choice([1, 2, 4])
        layers = [61 // (pp * vpp)] * (pp * vpp)
        for stage in draw.sample(range(pp * vpp), 61 % (pp * vpp)):
            layers[stage] += 1
        changed = {
            "parallel.tp": tp, "parallel.pp": pp, "parallel.cp": cp, "parallel.vpp": vpp,
            "parallel.ep": draw.choice([1, 8, 32, 64]), "parallel.microbatch": draw.choice([1, 2]),
            "parallel.zero_stage": draw.choice([0, 1, 2, 3]), "stages.layers": layers,
            "parallel.sequence_parallel": "true" if tp > 1 else "false",
            "schedule": "interleaved-1f1b" if vpp > 1 else "1f1b", "precision": draw.choice(["fp8", "bf16"]),
            "recompute": draw.choice(["none", "attention", "selective", "full"]),
            "batch.sequences": draw.choice([8192, 15360]),
        }  # fmt: skip
        if changed["parallel.ep"] != 1:  # without experts on other ranks no kernel holds SMs for them
            changed["communication.sms"] = draw.choice([8, 20, 24])
        found.append({key: str(value) for key, value in changed.items()})
    return found


def test_varied_plans_survive_the_round_trip_as_they_are_printed(tmp_path: Path) -> None:
    for changed in _varied(12, seed=5):
        check_round_trip(spellable(**changed), tmp_path)


@pytest.mark.parametrize(
    ("argument", "named"),
    [
        ("--pipeline-model-parallel-layout 'Et|'q", "'q'"),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et|t|tL'", "3 stages"),
        ("--moe-layer-freq '[0]*3+__import__'", "__import__"),
        ("--moe-layer-freq '[0,0,0]*9999+[1]*9999'", "more than 10,000"),
        ("--pipeline-model-parallel-layout 'Et*9999|t*9999L'", "more than 10,000 letters"),
    ],
)
def test_malformed_layouts_and_lists_are_refused(argument: str, named: str) -> None:
    with pytest.raises(InputError) as caught:
        launches.read(launches.MIXTRAL + argument + "\n", base="mixtral-8x7b-64xh100")
    assert named in str(caught.value)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=40), st.integers(0, 2), st.integers(1, 3))
def test_layouts_are_written_as_they_are_read(layers: list[int], mtp: int, behind: int) -> None:
    layers = [*layers, *[0] * (behind - 1)]
    text = layout_text(layers, mtp, -behind)
    assert layers_of_layout(text) == (len(layers), tuple(layers))
    assert mtp_stage_of_layout(text) == (-behind if mtp and behind > 1 else None)
    stages = expand_layout(text).split("|")
    assert stages[0].startswith("E") and stages[-1].endswith("L")
    assert stages[-behind].removesuffix("L").endswith("m" * mtp)


@pytest.mark.parametrize(
    ("text", "layers", "mtp"),
    [
        ("Et*3|(tt|)*29,m|L", (3, *(2,) * 29, 0, 0), -2),
        ("E|(t|)*94L", (0, *(1,) * 94, 0), None),
        ("Ettt|(tt|)*28t|mL", (3, *(2,) * 28, 1, 0), None),
        ("E||tttt|tm|L", (0, 0, 4, 1, 0), -2),
    ],
)
def test_published_layouts_are_read(text: str, layers: tuple[int, ...], mtp: int | None) -> None:
    assert layers_of_layout(text) == (len(layers), layers)
    assert mtp_stage_of_layout(text) == mtp
    again = layout_text(layers, text.count("m"), mtp)
    assert expand_layout(again) == expand_layout(text)


def test_a_layout_with_mtp_alone_is_imported() -> None:
    layout = "--pipeline-model-parallel-layout 'Et*3|(tt|)*29,m|L'"
    scenario = launches.read(f"--pipeline-model-parallel-size 8 --bf16 {layout}\n", base=HOME).scenario
    assert scenario.stages.layers == (3, *[2] * 29, 0, 0) and scenario.stages.mtp == -2
    assert scenario.parallel.vpp == 4


@given(st.text(alphabet="EtmL|()*,0123456789 ", max_size=30))
def test_any_layout_is_read_or_refused(text: str) -> None:
    with suppress(InputError):
        assert set(expand_layout(text)) <= set("EtmL|")


def test_experts_are_split_like_the_rest_unless_the_script_says_otherwise() -> None:
    """Megatron-LM's default for the tensor parallelism of experts is that of the other layers."""
    text = "--tensor-model-parallel-size 4 --sequence-parallel --bf16\n"
    assert launches.read(text, base=HOME).scenario.parallel.expert_tp == 4
    text += "--expert-tensor-parallel-size 1\n"
    assert launches.read(text, base=HOME).scenario.parallel.expert_tp == 1


@given(st.lists(st.integers(0, 1), min_size=1, max_size=80))
def test_frequencies_are_written_as_they_are_read(flags: list[int]) -> None:
    assert parse_frequency(frequency_text(flags), len(flags)) == tuple(flags)


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_torchtitan_snippets_are_python(name: str) -> None:
    vpp = "2" if SCHEDULES[name].free_vpp else "1"
    layers = str([4] * 15 + [1]) if name not in ("zbv", "dualpipev") else str([2] * 30 + [1])
    scenario = spellable(**{"schedule": name, "parallel.vpp": vpp, "stages.layers": layers})
    text = torchtitan_snippet(scenario)
    calls = {ast.unparse(n.func): n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call)}
    fields = {k.arg: k.value for k in calls["ParallelismConfig"].keywords}
    assert any(k.arg == "seq_len" for k in calls["TrainingConfig"].keywords)
    theirs = SCHEDULES[name].names_elsewhere.get("torch")
    assert (theirs is None) == (name in ("interleaved-1f1b-overlapped", "zb-h1", "dualpipe"))
    if theirs is None:
        assert f"schedule {name}: torch.distributed.pipelining has none" in text
        return
    assert ast.literal_eval(fields["pipeline_parallel_schedule"]) == theirs
    parts = ast.literal_eval(fields["module_fqns_per_model_part"])
    counts = [len([module for module in part if module.startswith("layers.")]) for part in parts]
    assert counts == ast.literal_eval(layers)
