from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import moesim
from moesim.hwmodels.confidence import LEVELS
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.yaml_io import dump_mapping
from moesim.simulator.scenario import Scenario, load_scenario, preset_names
from moesim.simulator.scenario.presets import shipped_presets
from moesim.simulator.schedules.template import OVERLAP_ORDERS

HOME = "deepseek-v3-2048xh800"


def written(tmp_path: Path, text: str, name: str = "s.yaml") -> str:
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def preset_text(**changes: Any) -> str:
    data = load_scenario(HOME).model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    return dump_mapping({**data, **changes})


# -- presets and files -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", preset_names())
def test_presets_load_and_name_themselves(name: str) -> None:
    scenario = load_scenario(name)
    assert scenario.name == name
    assert scenario.machine.n_gpus > 0
    assert scenario.recipe.dispatch == ("fp8" if name.startswith("deepseek-v3") else "bf16")
    assert scenario.communication.order_of(scenario.schedule) == OVERLAP_ORDERS["deepseek-v3"]


def test_a_dumped_scenario_loads_back(tmp_path: Path) -> None:
    again = load_scenario(written(tmp_path, preset_text()))
    assert again.resolved() == load_scenario(HOME).resolved()
    json_file = written(tmp_path, load_scenario(HOME).model_dump_json(), "s.json")
    assert load_scenario(json_file).resolved() == again.resolved()


def test_relative_paths_start_at_the_scenario_file(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "order.csv").write_text("0F0,0B0\n")
    path = written(tmp_path, preset_text(schedule="order.csv"), "sub/s.yaml")
    scenario = load_scenario(path)
    assert Path(scenario.path("order.csv")) == tmp_path / "sub" / "order.csv"
    assert scenario.path("deepseek-v3") == "deepseek-v3"


# -- overrides ---------------------------------------------------------------------------------------


def test_overrides_reach_every_depth_and_leave_the_rest() -> None:
    base = load_scenario(HOME)
    changed = load_scenario(
        HOME, ["parallel.ep=32", "schedule=1f1b", "routing.expert_load_cv.value=0.5", "seed=7", "seed=8"]
    )
    assert (changed.parallel.ep, changed.schedule, changed.seed) == (32, "1f1b", 8)  # the last one counts
    assert changed.routing.expert_load_cv.value == 0.5
    assert changed.routing.expert_load_cv.source == base.routing.expert_load_cv.source
    assert changed.parallel.pp == base.parallel.pp
    assert load_scenario(HOME).parallel.ep == 64  # the preset itself is not touched


def test_an_override_may_create_a_section_and_hold_any_yaml() -> None:
    order = "{compute: [attn F, mlp I, mlp W, mlp F, attn I, attn W], source: mine, "
    order += "communication: [combine B, dispatch F, dispatch B, combine F]}"
    changed = load_scenario(
        HOME, [f"communication.overlap={order}", "stages.layers=[4, 4]", "description=a = b", "name= x "]
    )
    assert changed.communication.order_of("dualpipe").source == "mine"
    assert changed.stages.layers == (4, 4)
    assert changed.description == "a = b"
    assert changed.name == "x"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("parallel.ep", ["--set 'parallel.ep'", "key=value"]),
        ("=3", ["key=value"]),
        ("parallel.microbatches=3", ["parallel.microbatches: unknown key", "nearest: 'microbatch'"]),
        ("paralel.ep=3", ["paralel: unknown key", "nearest: 'parallel'"]),
        ("comunication.sms=3", ["comunication: unknown key", "nearest: 'communication'"]),
        ("communication.sm=3", ["communication.sm: unknown key", "nearest: 'sms'"]),
        ("base=/tmp", ["base: unknown key"]),
        ("_base=/tmp", ["_base: unknown key"]),
        ("parallel.ep.x=3", ["'ep' is 64", "no keys below"]),
        ("parallel=3", ["parallel=3"]),
        ("parallel.ep=many", ["parallel.ep='many'"]),
        ("parallel.ep=1.5", ["parallel.ep=1.5"]),
        ("parallel.ep=0", ["parallel.ep=0"]),
        ("parallel.ep=", ["parallel.ep"]),
        ("parallel.zero_stage=4", ["parallel.zero_stage=4", "3"]),
        ("communication.sms=-1", ["communication.sms=-1", "0"]),
        ("recompute=all", ["recompute: 'all'", "none, attention, selective, op, full, deepseek-v3"]),
        ("routing.gate=best2", ["routing.gate='best2'", "nearest: 'best'"]),
        ("variation.clock_cv=1.01 s", ["variation.clock_cv"]),
        ("run.tokens=-1", ["run.tokens=-1"]),
        ("run.tokens=.inf", ["run.tokens"]),
        ("run.tokens=.nan", ["run.tokens"]),
        ("seed=-1", ["seed=-1"]),
        ("seed=9223372036854775808", ["seed"]),
        ("stages={layers: [1], blocks: [moe]}", ["exclude each other"]),
        ("model.layers=3", ["'model' is 'deepseek-v3'", "replace it as a whole"]),
        ("name=[1", ["--set name", "not valid YAML"]),
        ("name=!!int x", ["--set name", "not valid YAML"]),
        ("name=" + "[" * 5000 + "]" * 5000, ["--set name", "nested too deeply"]),
        ("name=[&a [x], *a]", ["--set name", "alias *a", "refused"]),
        ("name=\x00", ["--set name"]),
    ],
)
def test_a_bad_override_is_one_paragraph(override: str, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        load_scenario(HOME, [override])
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 1500
    for word in words:
        assert word in message


# -- files that are none -----------------------------------------------------------------------------

BOMB = "\n".join(['a0: &a0 ["x"]'] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["s.yaml", "empty"]),
        ("- 1", ["s.yaml", "a list"]),
        (BOMB, ["s.yaml", "line 2", "alias *a0"]),
        ("name: x\nname: y", ["s.yaml", "duplicate key"]),
        ("name: x", ["s.yaml", "model", "missing"]),
        ("1: x", ["s.yaml"]),
    ],
)
def test_a_bad_file_is_one_paragraph_that_names_it(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        load_scenario(written(tmp_path, text))
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_unknown_names_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"deepseek-v3-2048h800.*nearest: 'deepseek-v3-2048xh800'"):
        load_scenario("deepseek-v3-2048h800")
    with pytest.raises(InputError, match=r"cannot be read"):
        load_scenario(str(tmp_path / "none.yaml"))
    (tmp_path / "b.yaml").write_bytes(bytes([0x89, 0x50, 0xFF]))
    with pytest.raises(InputError, match="not a text file"):
        load_scenario(str(tmp_path / "b.yaml"))


def test_an_unknown_key_in_a_file_names_file_key_and_nearest(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        load_scenario(written(tmp_path, preset_text(comunication={"sms": 20})))
    assert "s.yaml: comunication: unknown key (nearest: 'communication')" in str(caught.value)


def test_every_quantity_of_a_preset_carries_its_source() -> None:
    for name in preset_names():
        scenario = load_scenario(name)
        spread = scenario.variation
        for part in (scenario.routing.expert_load_cv, spread.clock_cv, spread.jitter_cv):
            assert part.kind in ("measured", "derived", "published", "assumed")
            assert len(part.source) > 20
            assert part.date != "undated"


def test_the_schema_describes_every_key() -> None:
    schema = Scenario.model_json_schema()
    assert set(schema["properties"]) == set(Scenario.model_fields)
    assert schema["additionalProperties"] is False
    assert set(schema["required"]) == {"model"}
    assert schema["anyOf"] == [{"required": ["cluster"]}, {"required": ["fleet"]}]


def test_one_figure_inside_a_named_description_can_change() -> None:
    plain = load_scenario("deepseek-v3-2048xh800")
    changed = load_scenario(
        "deepseek-v3-2048xh800",
        ["cluster.nodes=128", "cluster.node.nic_bandwidth=800 Gb/s", "precision.gradient_reduce=bf16"],
    )
    assert (plain.machine.nodes, changed.machine.nodes) == (256, 128)
    before, after = plain.machine.node.nic_bandwidth, changed.machine.node.nic_bandwidth
    assert before is not None and after is not None
    assert after.value == 2 * before.value and after.kind == "assumed"
    assert changed.machine.node.accelerator == plain.machine.node.accelerator
    assert changed.recipe == plain.recipe.model_copy(update={"gradient_reduce": "bf16"})


# -- replace -------------------------------------------------------------------------------------------


def test_replace_is_an_override_in_python() -> None:
    home = load_scenario(HOME)
    for changed in (
        home.replace(communication={"sms": 8}, seed=3),
        home.replace(**{"communication.sms": 8, "seed": 3}),
    ):
        assert changed == load_scenario(HOME, ["communication.sms=8", "seed=3"])
        assert changed.communication.kernels == home.communication.kernels
    assert home.replace() == home
    assert home.communication.sms == 20


def test_replace_reaches_into_named_descriptions() -> None:
    home = load_scenario(HOME)
    wide = home.replace(**{"cluster.node.accelerator.scale_up_bandwidth": "450 GB/s"})
    assert wide.machine.node.scale_up_bytes_per_s == 450e9
    assert home.replace(cluster={"nodes": 128}).machine.n_gpus == 1024
    assert home.replace(cluster=wide.machine).machine == wide.machine


def test_replace_takes_whole_values() -> None:
    home = load_scenario(HOME)
    zipf = home.replace(**{"routing.load": {"kind": "zipf", "exponent": 0.3}})
    assert zipf.replace(routing={"load": {"kind": "uniform"}}).routing.load is not None
    assert zipf.replace(**{"routing.load": None}).routing.load is None
    assert home.replace(parallel=home.parallel.model_copy(update={"ep": 32})).parallel.ep == 32
    assert home.replace(stages={"layers": (4,) * 15 + (1,)}).stages.layers == (4,) * 15 + (1,)


def test_replace_keeps_where_relative_paths_start(tmp_path: Path) -> None:
    from moesim.simulator.model.catalogue import load_model

    shape = load_model("qwen3-30b-a3b").model_dump(mode="json", exclude_none=True)
    (tmp_path / "m.yaml").write_text(dump_mapping(shape))
    own = load_scenario(written(tmp_path, preset_text(model="m.yaml"))).replace(seed=1)
    assert isinstance(own.model, str)
    assert own.path(own.model) == str(tmp_path / "m.yaml")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"comunication": {"sms": 8}}, "nearest: 'communication'"),
        ({"communication.sm": 8}, "nearest: 'sms'"),
        ({"parallel": {"ep": -1}}, "parallel.ep=-1"),
        ({"cluster.node.accelerator.scale_up_bandwidth": 450e9}, "450"),
        ({"seed.deep": 1}, "no keys below"),
    ],
)
def test_replace_tells_what_is_wrong(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        load_scenario(HOME).replace(**changes)


def test_a_limit_on_groups_is_the_models_or_its_own() -> None:
    from moesim.simulator.predict.step import prepare

    home = load_scenario(HOME)
    reached = [
        prepare(home.replace(**{"routing.groups_per_token": limit})).pricer.targets().distinct_nodes
        for limit in (1, 4, None, 8)
    ]
    assert reached == sorted(reached) and reached[1] == reached[2]
    assert reached[0] == pytest.approx(1.0)
    with pytest.raises(InputError, match=r"groups_per_token=9 is not between 1 and 8"):
        prepare(home.replace(**{"routing.groups_per_token": 9}))


def test_a_scenario_with_its_recipe_written_out_has_a_text() -> None:
    scenario = load_scenario("deepseek-v3-2048xh800", ["precision={linear: bf16, tensor_gather: bf16}"])
    assert "precision stated inline" in str(scenario)


def test_presets_fit_and_say_how_sure_they_are() -> None:
    rows = shipped_presets()
    assert [row.preset for row in rows] == moesim.presets()
    assert len(rows) >= 8
    for row in rows:
        scenario = load_scenario(row.preset)
        assert scenario.name == row.preset and row.description and row.confidence in LEVELS
        assert moesim.check(scenario).memory.fits
    found = {row.preset: row for row in rows}
    assert found[HOME].confidence == "measured" and found[HOME].defaults == 0
    assert found["deepseek-v3-1024xmi300x"].confidence == "published"
    assert {row.accelerator for row in rows} >= {"h100-sxm", "h200-sxm", "b200-sxm", "gb200", "mi300x"}
