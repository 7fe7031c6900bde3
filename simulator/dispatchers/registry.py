"""All dispatchers by name, and the refusal of any other; a new one is one file and one line here.

A calibration profile may name further ones under `dispatchers`, with curves of these names: kernels of one's
own (`deepep.OWN`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from difflib import get_close_matches

from moesim.hwmodels.calibration import CalibrationProfile
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.validation import registry
from moesim.simulator.common.bounded_cache import BoundedCache, Same
from moesim.simulator.dispatchers.deepep import DEEPEP_2025_02, DEEPEP_2025_04, DEEPEP_LOW_LATENCY, OWN
from moesim.simulator.dispatchers.hybridep import HYBRIDEP
from moesim.simulator.dispatchers.nccl import NCCL, NCCL_ALLGATHER
from moesim.simulator.dispatchers.protocol import EFA, Dispatcher
from moesim.simulator.dispatchers.uccl import UCCL_EP, UCCL_EP_LOW_LATENCY

DISPATCHERS: Mapping[str, Dispatcher] = registry(
    DEEPEP_2025_02,
    DEEPEP_2025_04,
    HYBRIDEP,
    NCCL,
    NCCL_ALLGATHER,
    DEEPEP_LOW_LATENCY,
    UCCL_EP,
    UCCL_EP_LOW_LATENCY,
)

KEY = "communication.kernels"

FIGURES = (
    "sm_rate", "scale_up_fraction", "nic_fraction", "call_time", "token_time", "token_rate", "row_time",
    "row_rate", "ragged_factor", "nic_row_time", "nic_call_time", "nic_sm_rate", "fp8", "bf16", *EFA,
)  # fmt: skip
"""Parts of ids of a profile's `ep.` curves that name a figure, a format or an adapter, and no dispatcher."""


def dispatcher(name: str) -> Dispatcher:
    """The dispatcher of a value of `communication.kernels` that `check_known` has accepted."""
    return DISPATCHERS.get(name) or replace(OWN, name=name)


def check_runs(name: str, problem: Callable[[Dispatcher], str | None]) -> None:
    """Raise InputError, with the dispatchers that run, where there is a problem with the one of a name."""
    found = problem(dispatcher(name))
    if found is not None:
        runs = [other for other, kind in DISPATCHERS.items() if problem(kind) is None]
        raise InputError(f"{KEY}={name}: {found}; use {KEY}={runs[0]}", key=KEY, nearest=runs)


def check_known(kernels: str, profile: CalibrationProfile) -> None:
    """Raise InputError for a dispatcher that neither registry nor profile knows, and as `check_own` does."""
    own = _OWN_NAMES.get(Same(profile), lambda: check_own(profile))
    if kernels in DISPATCHERS or kernels in own:
        return
    known = (*DISPATCHERS, *own)
    close = get_close_matches(kernels, known)
    use = f"; use {KEY}={close[0]}." if close else "."
    raise InputError(
        f"{KEY}={kernels}: no such dispatcher; known: {', '.join(DISPATCHERS)}"
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
    families = {kind.curves for kind in DISPATCHERS.values()}
    known = {*DISPATCHERS, *profile.dispatchers, *families, *FIGURES}
    for curve, name in named.items():
        if name not in known:
            raise InputError(
                f"profile {profile.name}: curve {curve} is of a dispatcher {name!r} that nobody names; "
                f"known: {', '.join((*DISPATCHERS, *profile.dispatchers))}. Correct the id, or write "
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
