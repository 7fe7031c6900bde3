"""The programs of a step as flat tables for the compiled event loop."""

from __future__ import annotations

from typing import NamedTuple

from moesim.hwmodels.arrays import FloatArray, IntArray

COMPUTE, COMMUNICATION, SHARDING = 0, 1, 2
"""Kinds of a task: on the compute stream, or a transfer on one of the two transfer streams."""

BY_PATTERN, BY_ROW = -1, -2
"""Instead of the number of a demand: the demand follows an exchange pattern, or is listed by micro-batch."""


class StepSizes(NamedTuple):
    """StepSizes of a step, and two of its properties.

    `sends_take_time`: whether sends between pipeline ranks use links. `few_links`: which of the two link
    pools SimPy takes for as many links. `flows`: transfers and sends of the whole step, the most flows that
    can be.
    """

    members: int
    groups: int
    ranks: int
    stages: int
    microbatches: int
    sends_take_time: bool
    few_links: bool
    actions: int
    tasks: int
    flows: int


class Tables(NamedTuple):
    """All groups of a step. Actions, tasks, keys and processes of group g follow those of group g - 1.

    A process is a pipeline rank of a group. `action_*`: one entry an action. `code_*`: one a template; -1
    where an output does not leave inside the action. `task_*`: one a task of a template; `task_rows`,
    `task_payload`, `task_member`, `task_load` and `task_node_load` are memory addresses of [micro-batches,
    members] arrays (of payloads [micro-batches]), so that no duration is copied. `demand_*`: links and bytes
    of every constant demand, row by row. `pattern_*`: exchange patterns; link n of all patterns carries
    entries `pattern_link_first[n]` to `pattern_link_first[n + 1]`, each a share of what a member receives
    over the scale-out hop (source = member) or the scale-up hop (source = members + member). `pair_*` [group,
    source, target]: sends.
    """

    rank_of: IntArray
    process_first: IntArray
    action_code: IntArray
    action_stages: IntArray
    action_microbatches: IntArray
    action_waits: IntArray
    action_first_task: IntArray
    code_first: IntArray
    code_forward_out: IntArray
    code_backward_out: IntArray
    code_posts_forward: IntArray
    code_posts_backward: IntArray
    code_takes_gradient: IntArray
    task_kind: IntArray
    task_side: IntArray
    task_dep_first: IntArray
    task_deps: IntArray
    task_rows: IntArray
    task_launch: IntArray
    task_payload: IntArray
    task_member: IntArray
    task_demand: IntArray
    task_first_row: IntArray
    task_pattern: IntArray
    task_nic_bytes: FloatArray
    task_scale_up_bytes: FloatArray
    task_load: IntArray
    task_node_load: IntArray
    task_load_rows: IntArray
    row_demand: IntArray
    demand_first: IntArray
    demand_links: IntArray
    demand_bytes: FloatArray
    pattern_first_link: IntArray
    pattern_links: IntArray
    pattern_link_first: IntArray
    pattern_source: IntArray
    pattern_share: FloatArray
    pair_alone: FloatArray
    pair_demand: IntArray
    pair_slow: IntArray
    pair_slow_most: FloatArray
    capacity: FloatArray
    unit: FloatArray
