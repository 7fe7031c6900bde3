"""Links that concurrent transfers share at exact max-min fair rates, in SimPy."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any

import numpy as np
import simpy

from moesim.hwmodels.arrays import FloatArray
from moesim.hwmodels.errors import InputError
from moesim.simulator.engine.demand import Demand
from moesim.simulator.engine.fair_share import MOST_LINKS_IN_STEPS
from moesim.simulator.engine.simpy.sharing import FewLinks, Flow, Sharing
from moesim.simulator.engine.simpy.sharing_arrays import ManyLinks


class LinkPool:
    """Links and the transfers on them.

    `capacity_bytes_per_ns`: one value a link. A transfer that no other slows down takes exactly `alone_ns`;
    otherwise rates are max-min fair in bytes/s (docs/model.md, eq. E3). When a transfer starts or ends, only
    the transfers that tight links couple to it are solved again (eq. E3a). Latency is not part of a rate: the
    caller waits for it before it starts a transfer (eq. E3b).
    """

    def __init__(
        self,
        env: simpy.Environment,
        capacity_bytes_per_ns: FloatArray | Iterable[float],
        arrays: bool | None = None,
    ) -> None:
        """Start with every link idle; `arrays` overrides the choice of representation.

        Raises InputError for a bandwidth that is negative or not a number.
        """
        capacity = np.array(
            capacity_bytes_per_ns
            if isinstance(capacity_bytes_per_ns, np.ndarray)
            else list(capacity_bytes_per_ns),
            dtype=np.float64,
        )
        bad = np.flatnonzero(~(capacity >= 0.0))
        if len(bad):
            raise InputError(
                f"link {bad[0]}: a bandwidth of {capacity[bad[0]]} bytes/ns is not a rate; "
                "give zero or more, in bytes/s of one direction"
            )
        self.env = env
        self.capacity_bytes_per_ns = capacity
        use_arrays = len(capacity) > MOST_LINKS_IN_STEPS if arrays is None else arrays
        self.sharing: Sharing = ManyLinks(capacity) if use_arrays else FewLinks(capacity)
        self.started = 0
        """Transfers started so far."""
        self.solved = 0
        """Groups of coupled transfers solved so far."""
        self.solved_flows = 0
        """Transfers in those groups, summed."""

    @property
    def carried_bytes(self) -> FloatArray:
        """Bytes that the transfers started so far put on every link."""
        return self.sharing.carried()

    def start(self, demand: Demand, alone_ns: float) -> simpy.Event:
        """Put a transfer on its links now; the event succeeds when its last byte has arrived."""
        flow, _ = self._begin(demand, alone_ns)
        return self._event(flow)

    def transfer(self, demand: Demand, alone_ns: float) -> Generator[simpy.Event, Any, None]:
        """Run a transfer from inside a process; return when its last byte has arrived.

        No transfer is faster than alone, so the process first waits for the first deadline; only a transfer
        that others slowed down needs an event of its own.
        """
        flow, deadline = self._begin(demand, alone_ns)
        yield deadline
        if flow.remaining > 0.0:
            yield self._event(flow)

    def _event(self, flow: Flow) -> simpy.Event:
        if flow.done is None:
            flow.done = self.env.event()
        return flow.done

    def _begin(self, demand: Demand, alone_ns: float) -> tuple[Flow, simpy.Event]:
        """Put a flow on its links; return it and the event of its end if no other flow starts."""
        flow = Flow(demand, max(alone_ns, 1.0), self.started, updated_ns=self.env.now)
        self.started += 1
        groups = self.sharing.join(flow)
        if groups:
            self._solve(groups[0])
            return flow, self._event(flow)
        flow.rate = 1.0 / flow.alone_ns
        return flow, self._schedule(flow)

    def _schedule(self, flow: Flow) -> simpy.Event:
        flow.version += 1
        delay = max(0, round(flow.remaining / flow.rate))
        timeout = self.env.timeout(delay, value=(flow, flow.version))
        assert timeout.callbacks is not None
        timeout.callbacks.append(self._expire)
        return timeout

    def _expire(self, event: simpy.Event) -> None:
        value: Any = event.value
        flow, version = value
        if version != flow.version:
            return  # rescheduled since
        flow.remaining = 0.0
        for group in self.sharing.leave(flow):
            self._solve(group)
        if flow.done is not None:
            flow.done.succeed()

    def _solve(self, flows: list[Flow]) -> None:
        """Solve the rates of a coupled group; a flow that keeps its rate keeps its deadline."""
        now = self.env.now
        self.solved += 1
        self.solved_flows += len(flows)
        for flow, rate in zip(flows, self.sharing.rates(flows), strict=True):
            if rate == flow.rate and flow.version > 0:
                continue
            if rate <= 0.0:
                self._refuse(flow)
            flow.remaining = max(0.0, flow.remaining - flow.rate * (now - flow.updated_ns))
            flow.updated_ns = now
            flow.rate = rate
            self._schedule(flow)

    def _refuse(self, flow: Flow) -> None:
        links = flow.demand.links
        dead = links[self.capacity_bytes_per_ns[links] == 0.0]
        raise InputError(
            f"a transfer of {flow.demand.bytes.max():.6g} bytes crosses link {dead[0]}, "
            "whose bandwidth is 0: give the link a bandwidth, or route around it"
        )
