"""Dispatchers are those of the registry and of the profile; every other name is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec.structs import replace

import moesim
from moesim.hwmodels.calibration import CalibrationProfile, load_profile
from moesim.hwmodels.errors import InputError
from moesim.kernels.importers.common import merge
from moesim.simulator.dispatchers.protocol import Call
from moesim.simulator.dispatchers.registry import DISPATCHERS, check_known, check_own, dispatcher
from moesim.simulator.layout.job import resolve
from moesim.simulator.scenario import load_scenario

MIXTRAL = "mixtral-8x7b-64xh100"
TYPO = "communication.kernels=deeppe-2025-04"
OWN = Path(__file__).parents[3] / "examples/profiles/kernel-generations.yaml"


def test_a_dispatcher_that_nobody_knows_is_refused_with_those_there_are() -> None:
    with pytest.raises(
        InputError, match=r"deeppe-2025-04: no such dispatcher; known: deepep-2025-02"
    ) as error:
        resolve(load_scenario(MIXTRAL, [TYPO]))
    assert error.value.key == "communication.kernels" and error.value.nearest[0] == "deepep-2025-04"
    assert all(name in str(error.value) for name in DISPATCHERS)
    job = resolve(load_scenario(MIXTRAL))
    with pytest.raises(InputError, match="no such dispatcher"):
        job.changed_to(load_scenario(MIXTRAL, [TYPO]))


def test_a_profile_names_kernels_of_ones_own() -> None:
    profile = load_profile(OWN)
    assert check_own(profile) == ("ptx", "cuda-cpp", "v2", "offload")
    check_known("ptx", profile)
    assert type(dispatcher("ptx")) is type(dispatcher("deepep-2025-02"))
    with pytest.raises(
        InputError, match=r"of profile kernel-generations: ptx, cuda-cpp, v2, offload; use .*=ptx"
    ):
        check_known("ptxx", profile)
    with pytest.raises(InputError, match="no such dispatcher"):
        check_known("ptx", load_profile("h800-trace"))


def named(*names: str, without: str = "") -> CalibrationProfile:
    """The example's profile with other names for its kernels, or without the curves of one."""
    profile = load_profile(OWN)
    curves = tuple(c for c in profile.curves if not (without and c.id.endswith(f".{without}")))
    return profile.model_copy(update={"dispatchers": names, "curves": curves})


def test_names_and_curves_of_a_profile_must_match() -> None:
    with pytest.raises(
        InputError, match=r"curve ep\.dispatch\.sm_rate\.v2 is of a dispatcher 'v2' that nobody"
    ):
        check_own(named("ptx", "cuda-cpp", "offload"))
    with pytest.raises(InputError, match=r"names 'v2', but no curve ep\.\*\.v2 describes it"):
        check_own(named("ptx", "cuda-cpp", "v2", "offload", without="v2"))


def test_includes_and_merges_keep_the_names(tmp_path: Path) -> None:
    text = (
        f"name: outer\naccelerator: h800-sxm\nsoftware: s\ndescription: d\nevidence: e\ninclude: ['{OWN}']\n"
    )
    (tmp_path / "outer.yaml").write_text(text)
    assert check_own(load_profile(tmp_path / "outer.yaml")) == ("ptx", "cuda-cpp", "v2", "offload")
    assert check_own(merge(load_profile("h800-trace"), load_profile(OWN)))[0] == "ptx"


@pytest.mark.parametrize(
    "name", ["deepep-2025-02", "hybridep", "deepep-low-latency", "nccl", "nccl-allgather"]
)
def test_only_collectives_of_the_library_have_no_buffers(name: str) -> None:
    kind, group = dispatcher(name), Call(64, 8, 20, 4096.0, 7168, experts=256)
    assert (kind.buffers(group).total_bytes == 0) == kind.by_library == name.startswith("nccl")
    assert kind.buffers(replace(group, ranks=1)).total_bytes == 0


def test_kernels_of_ones_own_have_deepeps_rings_and_without_an_sm_one_channel() -> None:
    group = Call(64, 8, 20, row=7168)
    size = dispatcher("ptx").buffers(group).total_bytes
    assert size == dispatcher("deepep-2025-02").buffers(group).total_bytes > 713e6
    assert dispatcher("ptx").buffers(replace(group, sms=0)).total_bytes == pytest.approx(size / 10, rel=1e-5)


def test_no_other_package_compares_dispatchers_by_name() -> None:
    """Whoever asks a dispatcher, asks for what decides: a new one then needs no edit elsewhere."""
    compared = re.compile(
        '(kernels|transport|kind|name) *(==|!=|in|not in) *[(\\[{]?"('
        + "|".join(map(re.escape, DISPATCHERS))
        + ')"'
    )
    root = Path(moesim.__file__).parent
    files = [path for part in ("simulator", "app", "cli") for path in (root / part).rglob("*.py")]
    assert len(files) > 300
    assert not [str(path) for path in files if compared.search(path.read_text("utf-8"))]
