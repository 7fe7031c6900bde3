"""Our own runs: what is trained is what is predicted, and nobody rewrites a frozen prediction."""

from __future__ import annotations

import pytest

from lab.scoring import own_runs
from lab.scoring.own_runs_kernels import CLASSES, measured_class
from moesim.hwmodels import InputError
from moesim.simulator.cost.cost_table import bare_costs, with_collectives
from moesim.simulator.cost.transfers import expert_transfer
from moesim.simulator.memory.activations import activation_bytes
from moesim.simulator.model.operator import Phase
from moesim.simulator.predict.step import prepare


def test_a_scenario_has_the_shape_that_torchtitan_is_given() -> None:
    for run in own_runs.file().runs:
        scenario = own_runs.scenario_of(run.name)
        titan = own_runs.file().models[run.model].torchtitan
        arguments, experts = titan["arguments"], titan["moe"]
        shape, moe = scenario.shape, scenario.shape.moe
        assert (shape.n_layers, shape.hidden, shape.vocab) == (
            arguments["n_layers"], arguments["dim"], arguments["vocab_size"],
        )  # fmt: skip
        assert moe is not None and (moe.experts, moe.top_k, moe.expert_ffn) == (
            experts["num_experts"], experts["top_k"], arguments["moe_inter_dim"],
        )  # fmt: skip
        assert moe.router_bias == experts.get("gate_bias", False)
        heads = own_runs.file().models[run.model].shape
        for attention in heads.get("attentions", {"": heads.get("attention")}).values():
            assert [attention[key] for key in ("heads", "kv_heads", "head_dim")] == [
                arguments[key] for key in ("n_heads", "n_kv_heads", "head_dim")
            ]
        assert scenario.machine.n_gpus == scenario.parallel.ep == own_runs.GPUS == 2
        assert scenario.batch.sequences == 2 * run.microbatch


def test_an_unknown_run_is_refused_and_overrides_apply() -> None:
    with pytest.raises(InputError, match=r"qwen3-like-b3.*qwen3-like-b2"):
        own_runs.scenario_of("qwen3-like-b3")
    assert own_runs.scenario_of("gpt-oss-like-b2", "software.attention=flash").software.attention == "flash"


def test_a_list_without_transfers_keeps_fewer_rows_and_repeats_both() -> None:
    """torchtitan's selective recompute for Qwen3: 2 transfers of 8 rows of 2304 BF16 a token and layer."""
    kept = own_runs.scenario_of("qwen3-like-b4-op", "software.op_keeps_transfers=true")
    repeated = own_runs.scenario_of("qwen3-like-b4-op")
    active = [
        activation_bytes(s.shape, "moe", s.recipe, "op", s.parallel, s.batch.sequence_length, s.software)
        for s in (kept, repeated)
    ]
    assert active[0] - active[1] == 2 * 8 * 2304 * 2 * 4 * 4096
    pricers = [prepare(s).pricer for s in (kept, repeated)]
    phases: tuple[Phase, ...] = ("dispatch F", "combine F")
    costs = [expert_transfer(pricers[0], phase, "alone") for phase in phases]
    bare = bare_costs(pricers[0], "moe", ("alone",))
    first, second = (with_collectives(pricer, "moe", bare)["moe", "mlp I", "alone"] for pricer in pricers)
    again = sum(cost.launch_s + cost.payload_s for cost in costs)
    assert second.exposed_s - first.exposed_s == pytest.approx(again)


def test_profiled_kernels_have_the_class_of_their_operator_and_shapes() -> None:
    cases = {
        ("aten::mm", "[[8192,2304],[2304,151936]]", "nvjet"): "GEMM of the head",
        ("aten::mm", "[[8192,2304],[2304,3072]]", "nvjet"): "GEMM of a layer",
        ("aten::copy_", "[[8192,151936],[8192,151936],[]]", "cast"): "embedding, loss, logits",
        ("aten::copy_", "[[99090432],[99090432],[]]", "Memcpy DtoD"): "copies of FSDP",
        ("aten::copy_", "[[8192,8,2304],[8192,8,2304],[]]", "cast"): "routing and rows",
        ("aten::copy_", "[[2,4096,24,64],[2,4096,24,64],[]]", "copy"): "activation, rope, residual, bias",
        ("record_param_comms", "[[96],[]]", "ncclDevKernel_SendRecv"): "all-to-all",
        ("?", "", "triton_tem_fused_flex_attention_0"): "attention",
    }
    for (operator, shapes, kernel), kind in cases.items():
        assert measured_class(operator, shapes, kernel, 151936, 2304) == kind and kind in CLASSES


def test_every_run_was_measured_after_it_was_predicted() -> None:
    assert list(own_runs.measured()) == [run.name for run in own_runs.file().runs]
    for one in own_runs.measured().values():
        assert one.least_s <= one.step_s <= one.most_s
        assert one.idle_s + one.exposed_s < one.step_s
        assert one.peak_active_gib < one.peak_reserved_gib
