"""Dispatch and combine over virtual nodes: along rails to the same-index GPU, then inside the node.

The inter-node path of expert parallelism on one host: a token goes once to each target node, to the GPU with
the sender's local index (the relay), which forwards it to each target GPU there; combine runs backwards and
reduces at the relay. Both hops are the one-hop kernels: hop 1 with nodes as destinations, hop 2 on what hop 1
received. The hops run one after the other, without overlap: the cost of forwarding is measured by itself.
"""

from __future__ import annotations

from moesim.hwmodels.errors import InputError
from moesim.kernels.expert_parallel import ExpertParallel, Shape
from moesim.kernels.launch import Group, address


class TwoHop:
    """Virtual nodes of `node_size` consecutive ranks.

    `rails[l]` is the ExpertParallel of hop 1 between GPUs of local index l (its rank n = node n): write its
    `x`, `topk_idx`, `topk_w`, `side`. `nodes[n]` is hop 2 inside node n (its rank l = local index l): rows
    received end in its `recv_x`, `recv_side`; expert results go into its `results`; the combined rows arrive
    in `rails[l].out`. Partial sums travel as BF16, so a token is rounded once a node and once at its owner.
    """

    def __init__(self, group: Group, shape: Shape, node_size: int) -> None:
        """Allocate both hops; InputError where nodes do not divide ranks or experts."""
        if node_size < 1 or group.ranks % node_size:
            raise InputError(f"two hops: {group.ranks} ranks are no multiple of node_size={node_size}")
        shape.check(group.ranks)
        self.group, self.node_size, self.node_count = group, node_size, group.ranks // node_size
        members = range(group.ranks)
        self.rails = [
            ExpertParallel(group.subset(members[local::node_size]), shape) for local in range(node_size)
        ]
        relayed = Shape(
            self.node_count * shape.tokens, shape.hidden, shape.k, shape.experts // self.node_count, shape.fp8
        )
        self.nodes = []
        for node in range(self.node_count):
            first = node * node_size
            self.nodes.append(ExpertParallel(group.subset(members[first : first + node_size]), relayed))
            self._connect(node, shape)

    def _connect(self, node: int, shape: Shape) -> None:
        """Hop 2 reads what hop 1 received, and its combine writes what hop 1's combine reads."""
        hop = self.nodes[node]
        hop.first_expert, hop.choice_stride = node * hop.shape.experts, shape.side_bytes
        hop.writes_side = False
        hop.x = [rail.recv_x[node] for rail in self.rails]
        hop.side = [rail.recv_side[node] for rail in self.rails]
        hop.topk_idx = [side.reshape(-1)[shape.scale_bytes :] for side in hop.side]
        hop.topk_w = hop.topk_idx
        hop.out = [rail.results[node] for rail in self.rails]
        hop.tokens_at = [address(rail.received[node], 4) + 4 * self.node_count for rail in self.rails]

    def prepare(self) -> None:
        """Queue hop 1's layout on every rank."""
        for rail in self.rails:
            rail.layout()

    def send(self, sms: int) -> None:
        """Queue hop 1: exchange of counts and rows along the rails."""
        for rail in self.rails:
            rail.notify()
        for rail in self.rails:
            rail.dispatch(sms)

    def forward(self, sms: int) -> None:
        """Queue hop 2: layout of what arrived, exchange of counts and rows inside the nodes."""
        for hop in self.nodes:
            hop.layout()
        for hop in self.nodes:
            hop.notify()
        for hop in self.nodes:
            hop.dispatch(sms)

    def dispatch(self, sms: int) -> None:
        """Queue both hops; prepare comes before."""
        self.send(sms)
        self.forward(sms)

    def reduce(self, sms: int) -> None:
        """Queue the first half of combine: relays add up the results of their node."""
        for hop in self.nodes:
            hop.combine(sms, weighted=False)

    def collect(self, sms: int) -> None:
        """Queue the second half: owners add up the relays' rows."""
        for rail in self.rails:
            rail.combine(sms, weighted=False)

    def combine(self, sms: int) -> None:
        """Queue both halves."""
        self.reduce(sms)
        self.collect(sms)
