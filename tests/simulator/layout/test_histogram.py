from __future__ import annotations

import io
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesim.hwmodels.arrays import FloatArray
from moesim.hwmodels.errors import InputError
from moesim.simulator.layout import popularity
from moesim.simulator.layout.popularity import read_counts, shares_of_counts

GOOD = np.array([[4, 2, 1, 1], [2, 2, 2, 2]])


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def header(text: str) -> bytes:
    data = (text + " " * (118 - len(text) - 1) + "\n").encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(data)) + data


def archive() -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, GOOD)
    return buffer.getvalue()


def read(tmp_path: Path, name: str, content: bytes) -> FloatArray:
    (tmp_path / name).write_bytes(content)
    return read_counts(tmp_path / name)


def test_three_formats_say_the_same(tmp_path: Path) -> None:
    written = {
        "a.csv": b"# layer by layer\n4,2,1,1\n2, 2, 2, 2  # even\n\n",
        "a.npy": npy(GOOD),
        "a.json": b'{"counts": [[4, 2, 1, 1], [2, 2, 2, 2]]}',
    }
    for name, content in written.items():
        assert np.array_equal(read(tmp_path, name, content), GOOD), name
    steps = read(tmp_path, "b.json", b'{"counts": [[[4, 2, 1, 1]], [[2, 2, 2, 2]]]}')
    assert steps.shape == (2, 1, 4)
    assert read(tmp_path, "c.npy", npy(GOOD[0])).shape == (4,)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"1", "unknown file type '.txt'.*csv, .npy, .json"),
        ("a.csv", b"", "empty"),
        ("a.csv", b"layer,e0\n1,2\n", "line 1.*'layer' is not a number"),
        ("a.csv", b"1,2\n3\n", "line 2 has 1 counts.*has 2"),
        ("a.csv", b"1,,2\n", "line 1.*''"),
        ("a.csv", b"\x89PNG\r\n\xff\xfe", "not a text file"),
        ("a.npy", b"", "not a NumPy array"),
        ("a.npy", npy(np.array([{"a": 1}], dtype=object)), "not a NumPy array"),
        ("a.npy", npy(np.array(["a"])), "<U1.*integers or floats"),
        ("a.npy", npy(np.zeros((0, 4))), "shape .0, 4."),
        ("a.npy", npy(np.ones((1, 1, 1, 4))), "shape"),
        ("a.npy", header("{'descr': '<f8', 'fortran_order': False, 'shape': (1000000, 1000000), }"), "not a"),
        ("a.npy", header("__import__('os')"), "not a NumPy array"),
        ("a.npy", archive(), "archive"),
        ("a.json", b"[1]", "a list"),
        ("a.json", b'{"count": [1]}', "counts is missing"),
        ("a.json", b'{"counts": 3}', "counts is missing"),
        ("a.json", b'{"counts": [[1, "2"]]}', "counts.0.1='2'"),
        ("a.json", b'{"counts": [[1, true]]}', "counts.0.1=True"),
        ("a.json", b'{"counts": [[1, NaN]]}', "NaN"),
        ("a.json", b'{"counts": [[1], 2]}', "mixes"),
        ("a.json", b'{"counts": [[1], [1, 2]]}', "rows of"),
        ("a.json", b'{"counts": [[]]}', "rows of"),
        ("a.json", b'{"counts": [[[[1]]]]}', "deeper"),
        ("a.json", b'{"counts": [1' + b"0" * 400 + b"]}", "whole numbers are from"),
        ("a.json", b"[" * 100_000, "nested too deeply"),
    ],
)
def test_files_that_are_not_what_they_claim(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        read(tmp_path, name, content)
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_places_that_hold_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="No such file"):
        read_counts(tmp_path / "absent.csv")
    (tmp_path / "folder.npy").mkdir()
    with pytest.raises(InputError, match="not a file"):
        read_counts(tmp_path / "folder.npy")
    monkeypatch.setattr(popularity, "MAX_BYTES", 10)
    with pytest.raises(InputError, match="above the limit"):
        read(tmp_path, "big.csv", b"1,2,3,4,5,6\n")


@settings(max_examples=100)
@given(st.sampled_from(["csv", "npy", "json"]), st.binary(max_size=300))
def test_bytes_without_meaning_end_in_an_input_error(
    tmp_path_factory: pytest.TempPathFactory, kind: str, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / f"noise.{kind}"
    path.write_bytes((b"\x93NUMPY\x01\x00" if kind == "npy" else b"") + content)
    try:
        assert read_counts(path).size
    except InputError as error:
        assert path.name in str(error)


def shares(counts: object, layers: int = 2, experts: int = 4, top_k: int = 2) -> FloatArray:
    return shares_of_counts(
        np.array(counts, dtype=float), layers=layers, experts=experts, top_k=top_k, place="loads.csv"
    )


def test_shares_of_counts() -> None:
    assert np.allclose(shares(GOOD), GOOD[None] / 8)
    assert shares(GOOD[0]).shape == (1, 1, 4)
    assert shares(np.stack([GOOD, GOOD, GOOD])).shape == (3, 2, 4)
    assert np.allclose(shares([[0.3, 0.3, 0.3, 0.1]]), [[[0.3, 0.3, 0.3, 0.1]]])


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ([[4, 2, 1, 1], [2, 2, 2, 4]], "layer 1 sums to 10, but layer 0 to 8"),
        ([[3, 2, 1, 1], [2, 2, 2, 1]], "layer 0 sums to 7, .*multiple of top_k=2"),
        ([[4, 2, 1, 1], [2, 2, -2, 6]], "layer 1, expert 2: -2"),
        ([[4, 2, 1, 1], [2, 2, float("nan"), 2]], "layer 1, expert 2: nan"),
        ([[4, 2, 1, float("inf")], [2, 2, 2, 2]], "layer 0, expert 3: inf"),
        ([[4, 2, 1, 1e308], [2, 2, 2, 2]], "layer 0, expert 3: 1e.308 is no count"),
        ([[0, 0, 0, 0], [2, 2, 2, 2]], "layer 0 has no rows"),
        ([[5, 1, 1, 1], [2, 2, 2, 2]], "layer 0, expert 0: 5 rows, but only 4 tokens"),
        ([[4, 2, 1], [2, 2, 4]], "3 experts a row, but the model has 4"),
        ([[2, 2, 2, 2]] * 3, "3 layers, but the scenario has 2"),
        ([[GOOD.tolist()]], "shape"),
        ([GOOD.tolist(), [[4, 2, 1, 1], [2, 2, 2, 1]]], "step 1, layer 1 sums to 7"),
        (3.0, "experts a row"),
    ],
)
def test_counts_that_contradict_themselves_or_the_model(counts: object, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        shares(counts)
    assert "loads.csv" in str(caught.value)
