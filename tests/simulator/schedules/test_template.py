from __future__ import annotations

from itertools import pairwise, permutations
from typing import cast

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from moesim.hwmodels.errors import InputError
from moesim.simulator.model.operator import Phase
from moesim.simulator.schedules.template import (
    EP_PHASES,
    FORWARD_CHAIN,
    INPUT_CHAIN,
    OVERLAP_ORDERS,
    SCATTER,
    WEIGHT_OF,
    ActionKind,
    OverlapOrder,
    Template,
    build_template,
    joined_weight_gradients,
)

Stage = list[frozenset[Phase]]

FORWARD: frozenset[Phase] = frozenset(FORWARD_CHAIN)
BACKWARD: frozenset[Phase] = frozenset((*INPUT_CHAIN, *WEIGHT_OF))
SHARDING: frozenset[Phase] = frozenset(("gather F", "gather B", "scatter W"))
WANTED: dict[ActionKind, frozenset[Phase]] = {
    "F": FORWARD | {"gather F"},
    "I": frozenset(INPUT_CHAIN) | {"gather B"},
    "W": frozenset(("mlp W", "attn W", "scatter W")),
    "B": BACKWARD | {"gather B", "scatter W"},
}
MOE = FORWARD | BACKWARD
DENSE: frozenset[Phase] = MOE - cast(frozenset[Phase], EP_PHASES)
EMBEDDING: frozenset[Phase] = frozenset(("attn F", "attn W"))
HEAD: frozenset[Phase] = frozenset(("mlp F", "mlp I", "mlp W"))
DEFAULT = OVERLAP_ORDERS["deepseek-v3"]

blocks = st.sampled_from([MOE, MOE, DENSE, EMBEDDING, HEAD])
stages = st.lists(blocks, min_size=1, max_size=4)
kinds: st.SearchStrategy[ActionKind] = st.sampled_from(("F", "I", "W", "B"))


def graph_of(template: Template) -> nx.DiGraph:
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(template.tasks)))
    graph.add_edges_from((dep, n) for n, task in enumerate(template.tasks) for dep in task.deps)
    return graph


def check_common(template: Template) -> None:
    """What holds for every template: earlier dependencies, right streams, no phase twice."""
    seen = [(task.side, task.block, task.phase) for task in template.tasks]
    assert len(set(seen)) == len(seen)
    for number, task in enumerate(template.tasks):
        assert all(0 <= dep < number for dep in task.deps)
        assert (task.stream == "communication") == (task.phase in EP_PHASES)
        assert (task.stream == "sharding") == (task.phase in SHARDING)


def check_chains(template: Template, n_forward: int, n_backward: int) -> None:
    """True data dependencies: along each chain, across blocks, and from output gradient to weights."""
    reach = {n: nx.ancestors(graph_of(template), n) for n in range(len(template.tasks))}
    at = {(task.side, task.block, task.phase): n for n, task in enumerate(template.tasks)}
    forward = [at[0, b, p] for b in range(n_forward) for p in FORWARD_CHAIN if (0, b, p) in at]
    backward = [at[1, b, p] for b in reversed(range(n_backward)) for p in INPUT_CHAIN if (1, b, p) in at]
    for chain in (forward, backward):
        for position, number in enumerate(chain):
            assert set(chain[:position]) <= reach[number]
    for (side, block, phase), number in at.items():
        source = WEIGHT_OF.get(phase)
        if source is not None and (side, block, source) in at:
            assert at[side, block, source] in reach[number]


@given(kinds, stages, st.booleans())
def test_every_phase_of_an_action_once_and_in_order(kind: ActionKind, stage: Stage, sharded: bool) -> None:
    have = [block | SHARDING for block in stage] if sharded else stage
    template = build_template(kind, forward=have if kind == "F" else (), backward=have if kind != "F" else ())
    check_common(template)
    assert {(task.block, task.phase) for task in template.tasks} == {
        (b, phase) for b, block in enumerate(have) for phase in block & WANTED[kind]
    }
    assert {task.side for task in template.tasks} <= {0 if kind == "F" else 1}
    check_chains(template, len(have) if kind == "F" else 0, len(have) if kind != "F" else 0)
    assert (template.forward_out is None) or kind == "F"
    assert (template.backward_out is None) or kind in ("B", "I")


@given(kinds, stages)
def test_unoverlapped_actions_are_a_single_chain(kind: ActionKind, stage: Stage) -> None:
    template = build_template(
        kind, forward=stage if kind == "F" else (), backward=stage if kind != "F" else ()
    )
    for number, task in enumerate(template.tasks):
        assert task.deps == ((number - 1,) if number else ())
    block_order = [task.block for task in template.tasks]
    assert block_order == sorted(block_order, reverse=kind != "F")
    if template.tasks and kind == "F":
        assert template.forward_out == len(template.tasks) - 1
    if template.tasks and kind == "B":  # autograd hands on when the whole chunk is done
        assert template.backward_out == len(template.tasks) - 1


def test_parameter_gathers_run_one_block_ahead_and_nobody_waits_for_scatters() -> None:
    stage = [DENSE | SHARDING] * 4
    for kind, first in (("F", 0), ("B", 3)):
        name = cast(ActionKind, kind)
        template = build_template(
            name, forward=stage if kind == "F" else (), backward=stage if kind == "B" else ()
        )
        graph = graph_of(template)
        at = {(task.block, task.phase): n for n, task in enumerate(template.tasks)}
        step = 1 if kind == "F" else -1
        gather: Phase = "gather F" if kind == "F" else "gather B"
        for position in range(4):
            block = first + step * position
            own = [n for (b, p), n in at.items() if b == block and p not in SHARDING]
            ahead = nx.ancestors(graph, at[block, gather])
            # Behind the compute of the block two before it, never behind the one just before.
            before = {b for b in range(4) if any(at.get((b, p)) in ahead for p in DENSE)}
            assert before == {first + step * k for k in range(position - 1)}
            assert all(at[block, gather] in nx.ancestors(graph, n) for n in own)
            if kind == "B":
                assert not list(graph.successors(at[block, "scatter W"]))
                assert at[block, "attn W"] in nx.ancestors(graph, at[block, "scatter W"])


# -- pairs -------------------------------------------------------------------------------------------


def in_stream_order(template: Template, order: OverlapOrder, n_forward: int, n_backward: int) -> bool:
    """Whether both streams go layer pair by layer pair in the written order."""
    for listed, stream in ((order.compute, "compute"), (order.communication, "communication")):
        ranks = [
            (task.block if task.side == 0 else n_backward - 1 - task.block, listed.index(task.phase))
            for task in template.tasks
            if task.stream == stream
        ]
        if ranks != sorted(ranks):
            return False
    return True


def joined(order: OverlapOrder) -> OverlapOrder:
    """The order with weight gradients out of the same call as input gradients."""
    compute = joined_weight_gradients(order.compute)
    return order.model_copy(update={"weight_gradients": "with-input", "compute": compute})


@given(stages, stages, st.sampled_from([order for o in OVERLAP_ORDERS.values() for order in (o, joined(o))]))
def test_a_pair_runs_both_sides_whole(forward: Stage, backward: Stage, order: OverlapOrder) -> None:
    template = build_template("F&B", forward, backward, order)
    check_common(template)
    assert {(t.side, t.block, t.phase) for t in template.tasks} == {
        (0, b, p) for b, block in enumerate(forward) for p in block & FORWARD
    } | {(1, b, p) for b, block in enumerate(backward) for p in block & BACKWARD}
    check_chains(template, len(forward), len(backward))
    if order is DEFAULT:
        assert in_stream_order(template, DEFAULT, len(forward), len(backward))
    outputs = [n for n, t in enumerate(template.tasks) if t.side == 0]
    assert template.forward_out == (max(outputs) if outputs else None)
    leaves = INPUT_CHAIN if order.weight_gradients == "delayed" else (*INPUT_CHAIN, *WEIGHT_OF)
    gradients = [n for n, t in enumerate(template.tasks) if t.side == 1 and t.phase in leaves]
    assert template.backward_out == (max(gradients) if gradients else None)


@given(stages, stages)
def test_a_pair_with_an_input_gradient_has_no_weight_gradients(forward: Stage, backward: Stage) -> None:
    template = build_template("F&I", forward, backward, DEFAULT)
    check_common(template)
    assert not {t.phase for t in template.tasks} & set(WEIGHT_OF)
    whole = build_template("F&B", forward, backward, DEFAULT)
    kept = [(t.side, t.block, t.phase) for t in whole.tasks if t.phase not in WEIGHT_OF]
    assert sorted(kept) == sorted((t.side, t.block, t.phase) for t in template.tasks)


def test_the_pair_of_one_moe_layer_is_that_of_the_trace() -> None:
    template = build_template("F&B", [MOE], [MOE], DEFAULT)
    compute = [t.phase for t in template.tasks if t.stream == "compute"]
    communication = [t.phase for t in template.tasks if t.stream == "communication"]
    assert compute == ["attn F", "mlp I", "mlp W", "mlp F", "attn I", "attn W"]
    assert communication == ["combine B", "dispatch F", "dispatch B", "combine F"]


@given(stages, stages)
def test_compute_is_beside_communication_as_far_as_its_layer_pair_has_any(
    forward: Stage, backward: Stage
) -> None:
    template = build_template("F&B", forward, backward, DEFAULT)
    for task in template.tasks:
        position = task.block if task.side == 0 else len(backward) - 1 - task.block
        here = forward[position] & FORWARD if position < len(forward) else frozenset[Phase]()
        if position < len(backward):
            here = here | (backward[len(backward) - 1 - position] & BACKWARD)
        assert task.overlapped_share == len(here & EP_PHASES) / 4
    assert all(t.overlapped_share is None for t in build_template("F", forward).tasks)


def is_circular(order: OverlapOrder, layers: int) -> bool:
    """Independent of the builder: do stream order and data dependencies form a circle?"""
    graph = nx.DiGraph()
    for listed in (order.compute, order.communication):
        line = [(phase, n) for n in range(layers) for phase in listed]
        graph.add_edges_from(pairwise(line))
    for chain in (FORWARD_CHAIN, INPUT_CHAIN):  # n counts layer pairs: both directions go up
        line = [(phase, n) for n in range(layers) for phase in chain]
        graph.add_edges_from(pairwise(line))
    for n in range(layers):
        graph.add_edges_from(((source, n), (weight, n)) for weight, source in WEIGHT_OF.items())
    return not nx.is_directed_acyclic_graph(graph)


@given(
    st.permutations(DEFAULT.compute),
    st.sampled_from(list(permutations(DEFAULT.communication))),
    st.integers(1, 3),
)
def test_an_order_that_deadlocks_is_refused_and_no_other(
    compute: list[Phase], communication: tuple[Phase, ...], layers: int
) -> None:
    order = OverlapOrder(compute=tuple(compute), communication=communication, source="a test")
    if is_circular(order, layers):
        with pytest.raises(InputError, match=r"communication\.overlap deadlocks at .*deepseek-v3") as caught:
            build_template("F&B", [MOE] * layers, [MOE] * layers, order)
        assert "\n" not in str(caught.value)
    else:
        template = build_template("F&B", [MOE] * layers, [MOE] * layers, order)
        assert len(template.tasks) == 10 * layers
        check_chains(template, layers, layers)
        assert in_stream_order(template, order, layers, layers)


def test_a_pair_needs_an_order_and_has_no_slot_for_sharding() -> None:
    with pytest.raises(ValueError, match="needs an overlap order"):
        build_template("F&B", [MOE], [MOE])
    with pytest.raises(ValueError, match="no slot for gather F"):
        build_template("F&B", [MOE | {"gather F"}], [MOE], DEFAULT)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"compute": DEFAULT.compute[:-1]}, "compute must name each of"),
        ({"compute": (*DEFAULT.compute[:-1], "attn F")}, "compute must name each of"),
        ({"compute": (*DEFAULT.compute[:-1], "dispatch F")}, "compute must name each of"),
        ({"communication": DEFAULT.communication[:3]}, "communication must name each of"),
        ({"communication": (*DEFAULT.communication, "combine F")}, "communication must name each of"),
        ({"compute": ("attn G",)}, "compute"),
        ({"more": 1}, "more"),
    ],
)
def test_an_incomplete_order_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        OverlapOrder.model_validate({**DEFAULT.model_dump(), **change})


# -- Megatron core's order ---------------------------------------------------------------------------

MEGATRON = OVERLAP_ORDERS["megatron"]


def at_of(template: Template) -> dict[tuple[int, int, str], int]:
    return {(task.side, task.block, task.phase): n for n, task in enumerate(template.tasks)}


def test_megatron_pairs_layers_with_layers() -> None:
    """Embedding and head have no partner: the first layer forward runs beside the last one backward."""
    template = build_template("F&B", [HEAD, MOE, MOE], [MOE, MOE, HEAD], MEGATRON)
    pairs = {(t.side, t.block): t.layer_pair for t in template.tasks}
    assert pairs[0, 1] == pairs[1, 1] and pairs[0, 2] == pairs[1, 0]
    assert len({pairs[0, 0], pairs[1, 2], pairs[0, 1], pairs[0, 2]}) == 4
    assert all(
        t.overlapped_share == (0.0 if (t.side, t.block) in ((0, 0), (1, 2)) else 1.0) for t in template.tasks
    )
    shifted = build_template("F&B", [HEAD, MOE, MOE], [MOE, MOE, HEAD], DEFAULT)
    there = {(t.side, t.block): t.layer_pair for t in shifted.tasks}
    assert there[0, 0] == there[1, 2]  # DeepSeek's order counts them as blocks


def test_a_backward_alone_uses_both_streams_where_the_order_says_so() -> None:
    template = build_template("B", backward=[MOE, MOE], order=MEGATRON)
    at, graph = at_of(template), graph_of(template)
    ahead = nx.ancestors(graph, at[1, 1, "dispatch B"])
    assert at[1, 1, "mlp W"] not in ahead and at[1, 1, "mlp I"] in ahead
    assert at[1, 1, "attn W"] not in nx.ancestors(graph, at[1, 0, "combine B"])
    assert template.on_two_streams and template.backward_out == at[1, 0, "attn I"]
    serial = build_template("B", backward=[MOE, MOE], order=DEFAULT)
    assert not serial.on_two_streams and serial.backward_out == len(serial.tasks) - 1


def test_a_backward_alone_that_gathers_parameters_runs_serially() -> None:
    sharded = MOE | SHARDING
    template = build_template("B", backward=[sharded, sharded], order=MEGATRON)
    assert template == build_template("B", backward=[sharded, sharded])
    assert not template.on_two_streams and {t.stream for t in template.tasks} > {"sharding"}


def test_a_gradient_scatter_runs_beside_a_pair_after_its_blocks_backward() -> None:
    scattered = MOE | {SCATTER}
    plain = build_template("F&B", [MOE, MOE], [MOE, MOE], DEFAULT)
    template = build_template("F&B", [scattered] * 2, [scattered] * 2, DEFAULT)
    at, graph = at_of(template), graph_of(template)
    assert len(template.tasks) == len(plain.tasks) + 2
    for block in (0, 1):
        number = at[1, block, SCATTER]
        assert template.tasks[number].stream == "sharding"
        assert {at[1, block, phase] for phase in INPUT_CHAIN} <= nx.ancestors(graph, number)
        own = [
            n for n, t in enumerate(template.tasks) if (t.side, t.block, t.stream) == (1, block, "compute")
        ]
        assert template.tasks[number].deps == (max(own),)  # the last one of a stream in order
        assert not any(number in task.deps for task in template.tasks)  # nothing waits for it
    without = build_template("F&I", [scattered] * 2, [scattered] * 2, DEFAULT)
    assert SCATTER not in {task.phase for task in without.tasks}  # the weight gradients come later
    alone = build_template("B", backward=[scattered] * 2, order=MEGATRON)
    assert alone.on_two_streams and sum(task.phase == SCATTER for task in alone.tasks) == 2


def test_compute_waits_for_scatters_that_nothing_hides() -> None:
    scattered = MOE | {SCATTER}
    template = build_template("B", backward=[scattered] * 2, scatters_wait=True)
    at = at_of(template)
    assert template.tasks[at[1, 0, "combine B"]].deps == (at[1, 1, SCATTER],)
    assert template.backward_out is None  # the gradient leaves at the end of the action
    weights = build_template("W", backward=[scattered] * 2, scatters_wait=True)
    assert [task.phase for task in weights.tasks] == ["mlp W", "attn W", SCATTER] * 2


def test_joined_weight_gradients_hold_the_transfer_back() -> None:
    template = build_template("F&B", [MOE, MOE], [MOE, MOE], joined(MEGATRON))
    at, graph = at_of(template), graph_of(template)
    assert at[1, 1, "mlp W"] in nx.ancestors(graph, at[1, 1, "dispatch B"])
    assert at[1, 1, "attn W"] in nx.ancestors(graph, at[1, 0, "combine B"])
    assert template.backward_out == at[1, 0, "attn W"]
    with pytest.raises(ValidationError, match="right after 'mlp I'"):
        OverlapOrder.model_validate(
            MEGATRON.model_dump()
            | {
                "weight_gradients": "with-input",
                "compute": ["attn F", "mlp I", "mlp F", "mlp W", "attn I", "attn W"],
            }
        )


def test_gathers_that_wait_follow_the_block_before_and_hold_their_own() -> None:
    gathered: frozenset[Phase] = DENSE | {"gather F"}
    ahead, waiting = (build_template("F", [gathered] * 2, gathers_wait=wait) for wait in (False, True))
    at = at_of(waiting)
    last, first = at[0, 0, "mlp F"], at[0, 1, "attn F"]
    assert waiting.tasks[at[0, 1, "gather F"]].deps == (last,)
    assert waiting.tasks[first].deps == tuple(sorted((last, at[0, 1, "gather F"])))
    assert last not in ahead.tasks[at_of(ahead)[0, 1, "gather F"]].deps
