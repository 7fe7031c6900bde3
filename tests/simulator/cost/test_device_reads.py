"""Reads of the device inside a block empty the queue of launches again."""

from __future__ import annotations

import pytest

from moesim.simulator.cost.launches import Launch, PassLaunches, device_reads, launch_stall_s
from moesim.simulator.frameworks.software import Software
from moesim.simulator.model.operator import Operator


def test_a_read_holds_the_host_until_the_device_is_done() -> None:
    long, short = Launch(1.0, 10.0), Launch(2.0, 1.0)
    ahead = PassLaunches((long, short), drains=True)
    assert launch_stall_s(ahead) == pytest.approx(1.0)  # the second launch comes while the first runs
    read = PassLaunches((long, Launch(0.0, 0.0, reads=True), short), drains=True)
    assert launch_stall_s(read) == pytest.approx(1.0 + 2.0)  # it comes 2 s after the first has ended


def test_only_biases_that_are_repeated_by_row_read_the_device() -> None:
    bias = Operator("experts.down.bias", "elementwise", "F", "bf16", variant="add")
    assert [one.reads for one in device_reads(bias, Software(expert_biases="repeated"))] == [True]
    assert device_reads(bias, Software(expert_biases="split")) == []
    norm = Operator("ffn_norm", "norm", "F", "bf16")
    assert device_reads(norm, Software(expert_biases="repeated")) == []
