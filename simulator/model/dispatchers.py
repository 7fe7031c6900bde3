"""The dispatchers that move tokens to experts on other GPUs, as data."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from functools import lru_cache
from importlib import resources
from typing import Annotated, Any, Literal

from pydantic import Field

from moesim.hwmodels.accelerator import Accelerator
from moesim.hwmodels.calibration import CalibrationProfile
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.node import Node
from moesim.hwmodels.provenance import SourcedCount
from moesim.hwmodels.validation import validate_model
from moesim.hwmodels.yaml_io import parse_mapping
from moesim.simulator.common.bounded_cache import BoundedCache, Same

FILE = "data/communication_kernels.yaml"

Transport = Literal["two-hop", "domain", "direct", "all-to-all", "all-gather"]


class Dispatcher(Frozen):
    """How a dispatcher moves tokens, and the limits that its authors publish; None is no limit."""

    transport: Transport
    curves: str = ""
    """Suffix of the profile's curves that kernels of one family share; empty where each has its own."""
    architectures: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Architectures of accelerators that it runs on; empty: all."""
    domain_ranks: SourcedCount | None = None
    """Most ranks of a group inside one NVLink domain."""
    domains: SourcedCount | None = None
    """Most NVLink domains of a group."""
    whole_domains: bool = False
    """Whether a group of several domains must have exactly `domain_ranks` ranks in each."""
    tokens_across: SourcedCount | None = None
    """Most tokens of a rank where the group has several domains."""
    row_widths: Annotated[tuple[int, ...], Field(strict=False)] = ()
    """Elements of a row for which its kernels are compiled; empty: all."""
    most_choices: SourcedCount | None = None
    """Most experts that a token may choose."""
    fills_the_gpu: bool = False
    """Whether its kernels take almost all SMs while they run, so that nothing computes beside them."""
    pads_rows: bool = False
    """Whether its permutation pads the rows of each expert, so that no further kernel does."""
    permutes_in_call: bool = False
    """Whether dispatch and combine also launch the kernels that permute rows, on the stream of the call."""
    least_sms: SourcedCount | None = None
    most_sms: SourcedCount | None = None
    """Range of SMs with which its authors publish it."""

    def refuses(self, accelerator: Accelerator) -> str | None:
        """Why its kernels are not written for an accelerator; None if they are.

        A dedicated communication engine needs none of them.
        """
        if accelerator.communication_engine is not None or not self.architectures:
            return None
        if accelerator.architecture in self.architectures:
            return None
        where = ", ".join(self.architectures)
        return f"it runs on {where}, and {accelerator.name} is {accelerator.architecture}"

    def serves(self, node: Node, nodes: int) -> bool:
        """Whether it serves NVLink domains of `node`, of which a cluster has `nodes`.

        One domain may have fewer GPUs than `domain_ranks`; several may not where it needs whole ones.
        """
        if node.accelerator.communication_engine is not None or self.domain_ranks is None:
            return True
        size, most = node.n_gpus, self.domain_ranks.n
        return size == most or (size < most and (nodes == 1 or not self.whole_domains))


KEY = "communication.kernels"

OWN = Dispatcher(transport="two-hop")
"""Kernels of one's own, which a profile names; they move tokens as DeepEP does."""

FIGURES = (
    "sm_rate", "scale_up_fraction", "nic_fraction", "call_time", "token_time", "token_rate", "row_time",
    "row_rate", "ragged_factor", "nic_row_time", "nic_sm_rate", "fp8", "bf16",
)  # fmt: skip
"""Parts of the ids of a profile's `ep.` curves that name a figure or a format, and no dispatcher."""


def dispatcher(kernels: str) -> Dispatcher:
    """The dispatcher of a value of `communication.kernels` that `check_known` has accepted."""
    return dispatchers().get(kernels, OWN)


def check_known(kernels: str, profile: CalibrationProfile) -> None:
    """Raise InputError for a dispatcher that neither data file nor profile knows, and as `check_own` does."""
    own = _OWN_NAMES.get(Same(profile), lambda: check_own(profile))
    if kernels in dispatchers() or kernels in own:
        return
    known = (*dispatchers(), *own)
    close = get_close_matches(kernels, known)
    use = f"; use {KEY}={close[0]}." if close else "."
    raise InputError(
        f"{KEY}={kernels}: no such dispatcher; known: {', '.join(dispatchers())}"
        + (f", and of profile {profile.name}: {', '.join(own)}" if own else "")
        + f"{use} A calibration profile may name kernels of your own under `dispatchers`, with curves "
        "ep.nic_fraction.<name> and ep.dispatch.sm_rate.<name>",
        key=KEY,
        nearest=close or known,
    )


def check_own(profile: CalibrationProfile) -> tuple[str, ...]:
    """The profile's own dispatchers.

    Raises InputError for one without a curve, and for a curve of a dispatcher that nobody names.
    """
    named = {curve.id: curve.id.rpartition(".")[2] for curve in profile.curves if curve.id.startswith("ep.")}
    families = {kind.curves for kind in dispatchers().values()}
    known = {*dispatchers(), *profile.dispatchers, *families, *FIGURES}
    for curve, name in named.items():
        if name not in known:
            raise InputError(
                f"profile {profile.name}: curve {curve} is of a dispatcher {name!r} that nobody names; "
                f"known: {', '.join((*dispatchers(), *profile.dispatchers))}. Correct the id, or write "
                f"`dispatchers: [{name}]` into the profile if these are kernels of your own"
            )
    for name in profile.dispatchers:
        if name not in named.values():
            raise InputError(
                f"profile {profile.name}: dispatchers names {name!r}, but no curve ep.*.{name} describes it; "
                f"add ep.nic_fraction.{name} and ep.dispatch.sm_rate.{name}, or remove the name"
            )
    return profile.dispatchers


_OWN_NAMES: BoundedCache[tuple[str, ...]] = BoundedCache(64)
"""Own dispatchers of the profiles that were checked before."""


@lru_cache(maxsize=1)
def dispatchers() -> dict[str, Dispatcher]:
    """The dispatchers of the data file by name."""
    data = parse_mapping(resources.files("moesim.simulator").joinpath(FILE).read_text("utf-8"), FILE)
    return {name: validate_model(Dispatcher, _whole(data, name), f"{FILE}: {name}") for name in data}


def _whole(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An entry with the keys of the one that it is `like`."""
    own = dict(data[name])
    like = own.pop("like", None)
    return {**_whole(data, like), **own} if like else own
