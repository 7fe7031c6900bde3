"""What the ends of a pipeline and of a step cost: tied tables, embedding and head, all-reduces."""

from __future__ import annotations

import pytest

from moesim.hwmodels import InputError
from moesim.simulator.cost.cost_table import block_compute
from moesim.simulator.cost.data_parallel import (
    Pieces,
    data_parallel,
    gather_copies,
    parts_of,
    pieces_of,
    sharded_block,
)
from moesim.simulator.cost.end_of_step import rank_step_end, step_end
from moesim.simulator.cost.layer_collectives import LayerCollectives, amax_exposed_s
from moesim.simulator.cost.library_collectives import RingOperation, ring_price, small_all_reduce_s
from moesim.simulator.cost.pricing import Pricer, operators_key
from moesim.simulator.cost.table import PhaseCost
from moesim.simulator.layout.gradient_sync import check_gradient_sync
from moesim.simulator.layout.job import ResolvedJob, resolve
from moesim.simulator.memory.gpu import RankChunks
from moesim.simulator.model.catalogue import load_model
from moesim.simulator.model.operator import BlockKind, Phase
from moesim.simulator.predict.step import Prepared, prepare
from moesim.simulator.scenario import Scenario, load_scenario
from moesim.simulator.schedules import build

DENSE = "llama-3-70b-64xh100"
FOUR = (
    "batch.sequences=64",
    "batch.sequence_length=2048",
    "parallel.vpp=1",
    "schedule=1f1b",
    "software.framework=none",
)


def prepared(*overrides: str, tied: bool = False) -> Prepared:
    scenario = load_scenario(DENSE, (*FOUR, *overrides))
    shape = load_model("llama-3-70b").model_copy(update={"tied_embeddings": tied})
    return prepare(scenario.model_copy(update={"model": shape}))


def test_first_and_last_rank_add_up_the_gradients_of_a_table_that_they_share() -> None:
    apart = prepared(tied=True)
    shared = prepared("software.tied_tables_reduced=true", tied=True)
    before, after = (step_end(p.pricer, p.schedule, p.stages) for p in (apart, shared))
    pricer = shared.pricer
    table = pricer.shape.vocab * pricer.shape.hidden / 4 * 4.0
    alone = ring_price("all_reduce", table, 2, 1, pricer.links, pricer.profile).seconds
    more = [b.reduce_s - a.reduce_s for a, b in zip(before, after, strict=True)]
    assert alone > 0.0
    assert more == pytest.approx([alone, 0.0, 0.0, alone])
    untied = prepared("software.tied_tables_reduced=true")
    same = prepared()
    assert step_end(untied.pricer, untied.schedule, untied.stages) == step_end(
        same.pricer, same.schedule, same.stages
    )


def test_a_recompute_that_stops_early_leaves_out_its_last_gemm() -> None:
    whole, early = (
        [op.name for ops in prepared("recompute=full", key).pricer.operators("dense").values() for op in ops]
        for key in ("software.recompute_stops_early=false", "software.recompute_stops_early=true")
    )
    assert [name for name in whole if name not in early] == ["ffn.down.recompute"]
    assert len(whole) == len(early) + 1


def test_an_all_reduce_of_gradients_costs_both_rings() -> None:
    held = RankChunks((("dense", "dense"),))
    exposed = "software.overlap_data_parallel=false"
    once, twice = (
        rank_step_end(p.pricer, held, p.schedule)
        for p in (prepared(exposed), prepared(exposed, "software.gradients_all_reduced=true"))
    )
    assert 1.5 * once.reduce_s < twice.reduce_s < 2.5 * once.reduce_s
    assert twice.gather_s == once.gather_s


@pytest.mark.parametrize("split", [True, False])
def test_embedding_and_head_run_the_collectives_of_their_tensor_parallel_ranks(split: bool) -> None:
    split_key = f"parallel.sequence_parallel={str(split).lower()}"
    without, with_them = (prepared(split_key, key) for key in (
        "software.end_collectives=false", "software.end_collectives=true"
    ))  # fmt: skip
    pricer = with_them.pricer
    rows = pricer.tokens / 2 * pricer.shape.hidden * 2.0  # two context-parallel ranks share the tokens
    name: RingOperation = "reduce_scatter" if split else "all_reduce"
    scattered = ring_price(name, rows, 4, 4, pricer.links, pricer.profile).seconds
    bare = block_compute(without.pricer, "embedding", ("alone",))
    found = block_compute(pricer, "embedding", ("alone",))
    key = ("embedding", "mlp F", "alone")
    assert found[key].fixed_s - bare[key].fixed_s == pytest.approx(scattered)  # type: ignore[index]
    head = block_compute(pricer, "head", ("alone",))
    assert head["head", "mlp F", "alone"].exposed_s > (scattered if split else 0.0)
    assert head["head", "mlp I", "alone"].exposed_s > 0.0
    one = prepared("parallel.tp=1", "parallel.sequence_parallel=false", "software.end_collectives=true")
    alone = block_compute(one.pricer, "head", ("alone",))
    assert all(cost.exposed_s == 0.0 for cost in alone.values()), "one rank has nobody to talk to"


def test_a_norm_without_a_measurement_takes_the_share_of_norms_not_of_streams() -> None:
    pricer = prepared().pricer
    costs = dict(
        zip(
            (op.name for op in pricer.operators("dense")["attn I"]),
            pricer.operator_costs("dense", "attn I", "alone"),
            strict=True,
        )
    )
    assert costs["ffn_norm.backward"].curve_ids[0] == "norm-priors.backward"
    assert costs["ffn_norm.add_gradient"].curve_ids[0] != "norm-priors.backward"


# -- Pieces of data-parallel collectives, small all-reduces, and passes over the grad -----------

US = 1e-6


def pricer_of(scenario: Scenario, *overrides: str) -> Pricer:
    return Pricer(resolve(scenario.overridden(*overrides)))


def test_a_small_all_reduce_is_a_tree_of_nccls_latencies() -> None:
    """2,048 GPUs: 6.8 us, 14 steps of 0.6 us in the nodes and 16 of 5 us between 256 of them."""
    assert small_all_reduce_s(2048, 8) == pytest.approx((6.8 + 14 * 0.6 + 16 * 5.0) * US)
    assert small_all_reduce_s(1, 8) == 0.0
    sizes = [small_all_reduce_s(8 * nodes, 8) for nodes in (1, 2, 8, 128, 1344)]
    assert sizes == sorted(sizes) and len(set(sizes)) == len(sizes)


def test_pieces_follow_the_bucket_of_the_trainer(small: Scenario) -> None:
    """Sixteen replicas twice: 1 M for each is below 40 M parameters, so buckets hold 40 M."""
    kinds, held = ("moe", "moe"), (1000e6, 100e6)
    overlap = "software.overlap_data_parallel=true"
    megatron = pricer_of(small, overlap, "software.data_parallel_buckets=megatron")
    assert pieces_of(megatron, kinds, *held, 2) == Pieces(25, 2)
    stated = pricer_of(small, overlap, "software.bucket_parameters=500000000")
    assert pieces_of(stated, kinds, *held, 2) == Pieces(2, 1)
    assert pieces_of(pricer_of(small, overlap), kinds, *held, 2) == Pieces(2, 2)
    assert pieces_of(pricer_of(small), kinds, *held, 2) == Pieces(1, 1)


def test_every_piece_pays_the_latency_of_its_ring(small: Scenario) -> None:
    pricer = pricer_of(small)
    whole = data_parallel(pricer, "reduce_scatter", 1e9, 0.0, 2).seconds
    tenth = data_parallel(pricer, "reduce_scatter", 1e8, 0.0, 2).seconds
    assert data_parallel(pricer, "reduce_scatter", 1e9, 0.0, 2, Pieces(10, 1)).seconds == pytest.approx(
        10 * tenth
    )
    assert 10 * tenth > whole


def test_only_delayed_scaling_waits_for_largest_elements(small: Scenario) -> None:
    prices = {(phase, "alone"): PhaseCost(1e-3) for phase in ("attn F", "mlp F", "mlp I", "attn I")}
    tensor = "precision={linear: fp8, scaling: tensor}"
    every = "software.amax_reduction=data-parallel"

    def seconds(*overrides: str) -> float:
        return sum(amax_exposed_s(pricer_of(small, *overrides), "moe", prices).values())  # type: ignore[arg-type]

    assert seconds(tensor) == 0.0
    assert seconds(every) == 0.0  # tiles have scales of their own
    assert seconds(tensor, every, "software.fp8_scales=current") == 0.0
    own = seconds(tensor, every, "variation.jitter_cv=0")
    assert 0.0 < own < seconds(tensor, every, "variation.jitter_cv=0.02")


# -- Hybrid FSDP: gathers stay inside a group, and gradients cross groups once a step -----------

SHARDED = ("model=llama-3-8b", "schedule=1f1b", "recompute=none", "batch.sequences=2048")


def pricer(group: str, *more: str) -> Pricer:
    plan = f"parallel={{tp: 1, microbatch: 1, zero_stage: 3, shard_group: {group}}}"
    scenario = load_scenario("deepseek-v3-2048xh800", [*SHARDED, plan, *more])
    return Pricer(ResolvedJob(scenario, scenario.shape, scenario.machine, scenario.calibration))


def end_of_step(own: Pricer) -> tuple[float, float]:
    cost = rank_step_end(own, RankChunks((("dense",) * 32,)), build("1f1b", 1, 1))
    return cost.reduce_s, cost.gather_s


def test_a_group_on_one_node_leaves_the_network_alone() -> None:
    whole, inside = (sharded_block(pricer(group), "dense").transfers for group in ("null", "8"))
    assert all(cost.nic_bytes > 0.0 for cost in whole.values())
    assert all(cost.nic_bytes == 0.0 for cost in inside.values())
    assert inside["gather F"].payload_s < whole["gather F"].payload_s


def test_a_gather_of_fsdp2_waits_for_the_copy_of_the_shards_that_it_sends() -> None:
    fsdp2 = pricer("null", "software.parameters_copied=true", "parallel.zero_stage=3")
    (copy,) = gather_copies(fsdp2, "dense")
    dense, _ = fsdp2.block_parameters("dense")
    ranks = fsdp2.layout.dp * fsdp2.scenario.parallel.cp
    assert copy.bytes_read + copy.bytes_written == pytest.approx(4.0 * dense / ranks)  # BF16 both ways
    with_copy, without = (
        sharded_block(p, "dense").transfers
        for p in (fsdp2, pricer("null", "software.parameters_copied=false"))
    )
    kept = "software.parameters_copied=true", "parallel.zero_stage=3", "precision.parameters=fp32"
    wide = pricer("null", *kept, "precision.parameter_gather=bf16")
    cast, again = gather_copies(wide, "dense")  # FP32 shards are cast into one tensor, which is copied
    assert cast.bytes_read + cast.bytes_written == pytest.approx(6.0 * dense / ranks)
    assert again.bytes_read + again.bytes_written == pytest.approx(4.0 * dense / ranks)
    once = pricer("null", *kept, "precision.parameter_gather=bf16", "software.shards_cast=false")
    assert gather_copies(once, "dense") == (again,)
    seconds = fsdp2.compute((copy,), "alone").seconds
    for phase in ("gather F", "gather B"):
        assert with_copy[phase].payload_s - without[phase].payload_s == pytest.approx(seconds)
    assert with_copy["scatter W"].payload_s == without["scatter W"].payload_s


def test_matrices_are_gathered_one_by_one_with_a_copy_for_every_rank() -> None:
    alone, whole = (
        pricer("null", "parallel.zero_stage=3", f"software.parameter_gathers={how}", "recompute=full")
        for how in ("matrix", "block")
    )
    parts = [parts_of(alone, "dense", phase) for phase in ("gather F", "gather B", "scatter W")]
    ranks = alone.layout.dp * alone.scenario.parallel.cp
    # Four matrices; a recomputed forward and its backward need all of them, but the last one twice at once.
    assert [part.collectives for part in parts] == [4, 7, 4 + 2]
    assert [part.copies for part in parts] == [4 * ranks, 7 * ranks, 6 * ranks]
    h, ffn = alone.shape.hidden, 14336
    total = h * (h + h // 2 + h + 3 * ffn)  # queries, keys and values, output, feed-forward
    assert parts[1].times == pytest.approx(2.0 - h * ffn / total)
    assert parts_of(whole, "dense", "gather B") == (1, 1.0, 0.0)
    ring, block = (sharded_block(p, "dense") for p in (alone, whole))
    assert block.hidden and not ring.hidden
    assert ring.transfers["gather F"].payload_s > block.transfers["gather F"].payload_s  # four latencies
    plan = alone.scenario.parallel.model_copy(update={"zero_stage": 1})
    with pytest.raises(InputError, match=r"parameter_gathers=matrix with parallel\.zero_stage=1"):
        check_gradient_sync(plan, alone.scenario.software)


def test_groups_reduce_over_each_other_once_a_step() -> None:
    assert end_of_step(pricer("null")) == (0.0, 0.0)
    reduce_s, gather_s = end_of_step(pricer("8"))
    assert reduce_s > gather_s > 0.0  # FP32 gradients, BF16 parameters
    held = "parallel.shard_optimizer_over_groups=false", "software.gradient_sync=last-microbatch"
    all_reduce_s, nothing = end_of_step(pricer("8", *held))
    assert nothing == 0.0
    assert all_reduce_s > reduce_s
    hidden = end_of_step(pricer("8", "software.overlap_data_parallel=true"))
    assert hidden[0] < reduce_s


def test_hsdp_reduces_over_its_groups_in_every_backward() -> None:
    fsdp2 = pricer("8", "parallel.shard_optimizer_over_groups=false")
    assert end_of_step(fsdp2) == (0.0, 0.0)
    every, megatron = (sharded_block(own, "dense").transfers["scatter W"] for own in (fsdp2, pricer("8")))
    assert megatron.nic_bytes == 0.0  # inside the group of a node
    dense, _ = fsdp2.block_parameters("dense")
    shard, groups = dense / 8 * 4, 2048 // 8  # an FP32 shard, all-reduced over the groups
    assert every.nic_bytes == pytest.approx(2 * shard * (groups - 1) / groups)
    assert every.payload_s > megatron.payload_s


def test_few_sms_cost_less_compute_beside_a_collective() -> None:
    measured, few = pricer("8"), pricer("8", "communication.library_sms=6")
    assert few.lost_beside_library < measured.lost_beside_library == measured.profile.lost_beside_nccl.value


def test_plans_that_add_up_gradients_share_operators_only_with_as_many_micro_batches() -> None:
    plan = {"zero_stage": 0, "pp": 2, "tp": 4}
    base = {
        "cluster": {"accelerator": "h100-sxm", "nodes": 2},
        "name": "k", "model": "llama-3-8b", "parallel": plan,
        "batch": {"sequences": 64, "sequence_length": 1024}, "precision": "bf16", "recompute": "full",
        "software": {"weight_gradients": "written"},
    }  # fmt: skip

    def key(*overrides: str) -> object:
        return operators_key(prepare(load_scenario(base, overrides)).pools[0].job)

    assert key() != key("parallel.pp=4")  # 32 micro-batches and 64
    assert key() == key("parallel.pp=4", "batch.sequences=32")
    assert key("parallel.zero_stage=1") == key("parallel.zero_stage=1", "parallel.pp=4")


@pytest.mark.parametrize("split", [True, False])
def test_an_mtp_module_gathers_and_scatters_around_its_projection(split: bool) -> None:
    def inside(ends: bool, kind: BlockKind = "mtp") -> dict[Phase, float]:
        scenario = load_scenario(
            "deepseek-v3-2048xh800",
            ("parallel.tp=2", f"parallel.sequence_parallel={split}", f"software.end_collectives={ends}"),
        )
        return LayerCollectives(Pricer(resolve(scenario)), kind).inside({}).exposed

    with_ends, without = inside(True), inside(False)
    assert inside(True, "moe") == inside(False, "moe") == without
    pricer = Pricer(resolve(load_scenario("deepseek-v3-2048xh800", ("parallel.tp=2",))))
    rows = pricer.tokens * pricer.shape.hidden * 2.0

    def ring(operation: RingOperation, size: float) -> float:
        return ring_price(operation, size, 2, 2, pricer.links, pricer.profile).seconds

    backward = (
        2.0 * ring("all_gather", rows) + ring("reduce_scatter", 2.0 * rows)
        if split
        else ring("all_reduce", 2.0 * rows)
    )
    assert with_ends["attn I"] - without["attn I"] == pytest.approx(backward)
    assert with_ends["attn F"] - without["attn F"] > ring("all_gather", rows)
