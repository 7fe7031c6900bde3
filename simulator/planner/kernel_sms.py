"""The numbers of SMs with which communication kernels were published, which limit what a search tries."""

from __future__ import annotations

from dataclasses import dataclass

from moesim.hwmodels.provenance import SourcedCount
from moesim.simulator.model.dispatchers import dispatcher

STEP = 4
"""Step of the numbers of SMs that a search tries: two channels of DeepEP, each with two SMs."""

RISK = (
    "what keeps users from it is not priced: queues and chunks are tuned for the published numbers, and "
    "fewer channels have fewer sends in flight, so congestion and late ranks of a large network stay exposed "
    "longer than on the idle nodes of the measured curves"
)
"""What a saving of communication SMs risks and the prices do not contain."""


@dataclass(frozen=True, slots=True)
class PublishedSms:
    """Range of SMs with which the authors of a generation of kernels tune, test and publish it."""

    least_sms: SourcedCount
    most_sms: SourcedCount

    @property
    def tried(self) -> tuple[int, ...]:
        """Numbers of SMs that a search tries, from the least to the most."""
        least, most = self.least_sms.n, self.most_sms.n
        return (*range(least, most, STEP), most)

    @property
    def fewer(self) -> int:
        """Half of the least number, made even: the saving that a note of a search names."""
        return self.least_sms.n // 4 * 2


def published_sms(kernels: str) -> PublishedSms | None:
    """The published range of a generation of kernels; None where nobody published one."""
    entry = dispatcher(kernels)
    if entry.least_sms is None or entry.most_sms is None:
        return None
    return PublishedSms(entry.least_sms, entry.most_sms)
