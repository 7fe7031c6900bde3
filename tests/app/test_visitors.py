"""The file with which visitors' tokens are signed: only a whole one that nobody else can know is used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("streamlit", reason="streamlit is not installed")

from moesim.app import visitors


@pytest.fixture
def secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], bytes]:
    """The secret of a server that starts anew."""
    monkeypatch.setenv("MOESIM_CACHE", str(tmp_path / "kept"))
    monkeypatch.setattr(visitors, "_secret", visitors._secret)

    def read() -> bytes:
        visitors._secret.cache_clear()
        found = visitors._secret()
        visitors._secret.cache_clear()
        return found

    return read


def test_a_restarted_server_knows_its_visitors(secret: Callable[[], bytes], tmp_path: Path) -> None:
    first = secret()
    assert len(first) == 32 and secret() == first
    path = tmp_path / "kept" / visitors.SECRET
    assert path.read_bytes() == first and path.stat().st_mode & 0o777 == 0o600
    assert [item.name for item in path.parent.iterdir()] == [visitors.SECRET]


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:31])


def open_to_all(path: Path) -> None:
    path.chmod(0o666)


def readable_for_the_group(path: Path) -> None:
    path.chmod(0o640)


def link(path: Path) -> None:
    other = path.with_name("elsewhere")
    other.write_bytes(path.read_bytes())
    other.chmod(0o600)
    path.unlink()
    path.symlink_to(other)


@pytest.mark.parametrize("harm", [emptied, cut, open_to_all, readable_for_the_group, link])
def test_another_one_is_replaced(
    secret: Callable[[], bytes], tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    first, path = secret(), tmp_path / "kept" / visitors.SECRET
    harm(path)
    second = secret()
    assert second != first and secret() == second, "the new one is kept"
    assert not path.is_symlink() and path.stat().st_mode & 0o777 == 0o600


def test_a_folder_that_cannot_be_written_to_costs_only_the_memory(
    secret: Callable[[], bytes], tmp_path: Path
) -> None:
    (tmp_path / "kept").touch()
    assert len(secret()) == 32
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
