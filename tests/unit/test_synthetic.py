"""A file that was never written is a safetensors file all the same."""

from __future__ import annotations

import ctypes
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx_cli.engine.buffers import at_address
from mx_cli.model import header
from mx_cli.model.digest import TensorDigester
from mx_cli.model.holding import Extents, size_of
from mx_cli.model.synthetic import FILE, Run, Synthetic, synthesize
from tests.support import capability, noise

MEMORY = bytearray(noise("memory", 512))
BASE = ctypes.addressof(ctypes.c_char.from_buffer(MEMORY))


def content(found: Synthetic) -> bytes:
    """The file, gathered from where its bytes lie."""
    head = bytearray(found.header)
    extents = Extents(found.extents(ctypes.addressof(ctypes.c_char.from_buffer(head))))
    return b"".join(bytes(at_address(row.address, row.length)) for row in extents.cut(FILE, 0, found.size))


def memory_of(run: Run) -> bytes:
    return bytes(MEMORY[run.address - BASE : run.end - BASE])


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=6).filter(lambda name: name != "__metadata__")
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def tensors(draw: st.DrawFn) -> list[Run]:
    """Anywhere in one memory: apart, the same, one inside the other, overlapping, empty."""
    rows = st.tuples(st.sampled_from(["U8", "BF16", "F32", "F4", "C64"]), shapes, st.integers(0, 100))
    found = []
    chosen = draw(st.lists(names, unique=True, max_size=8))
    for name in chosen:
        dtype, shape, at = draw(rows)
        if dtype == "F4":
            shape = (*shape, 2)
        if size_of(dtype, shape) <= 300:
            found.append(Run(name, dtype, shape, BASE + at))
    return found


@given(tensors())
def test_every_tensor_is_found_where_the_file_says(runs: Sequence[Run]) -> None:
    found = synthesize(runs)
    data = content(found)
    assert len(data) == found.size
    parsed = header.parse_header(data, len(data), FILE)
    rows = {tensor.name: tensor for tensor in parsed.tensors}
    assert len(rows) == len(found.runs)
    assert {name: tensor.start for name, tensor in rows.items()} == found.starts
    assert parsed.data_start % 64 == 0
    for run in runs:
        if run.name in found.aliases:
            alias = found.aliases[run.name]
            assert (alias.dtype, alias.shape) == (run.dtype, run.shape)
            start = rows[alias.of].start + alias.offset
            assert start + alias.size <= rows[alias.of].end
        else:
            assert (rows[run.name].dtype, rows[run.name].shape) == (run.dtype, run.shape)
            start = rows[run.name].start
        assert data[start : start + run.size] == memory_of(run)
    digester = TensorDigester(FILE, found.size)
    digester.update(memoryview(data))
    assert len(digester.finish()) == len(rows)


@given(tensors())
def test_bytes_are_there_once(runs: Sequence[Run]) -> None:
    found = synthesize(runs)
    used = {at for run in runs for at in range(run.address, run.end)}
    assert found.size - len(found.header) == len(used)
    own = sorted((run.address, run.end) for run in found.runs if run.size)
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(own))
    assert not {run.name for run in found.runs} & found.aliases.keys()


def test_of_tied_tensors_the_first_keeps_its_name() -> None:
    """As a checkpoint does: model.embed_tokens.weight is there, lm_head.weight is not."""
    embed, head = (Run(name, "F32", (4, 2), BASE) for name in ("model.embed_tokens.weight", "lm_head.weight"))
    found = synthesize([embed, head])
    assert [run.name for run in found.runs] == ["model.embed_tokens.weight"]
    assert found.aliases["lm_head.weight"][:2] == ("model.embed_tokens.weight", 0)


def test_of_tensors_that_begin_together_the_longest_holds_the_others() -> None:
    found = synthesize([Run("part", "U8", (4,), BASE), Run("whole", "U8", (8,), BASE)])
    assert [run.name for run in found.runs] == ["whole"]
    assert found.aliases["part"] == ("whole", 0, "U8", (4,))


def test_the_name_of_what_holds_others_is_nobodys() -> None:
    runs = [Run("a", "U8", (8,), BASE), Run("b", "U8", (8,), BASE + 4), Run("a+1", "U8", (1,), BASE + 100)]
    found = synthesize(runs)
    holders = [run.name for run in found.runs if run.name not in {"a", "b", "a+1"}]
    assert len(holders) == 1
    assert {alias.of for alias in found.aliases.values()} == set(holders)


def test_an_empty_tensor_in_the_midst_of_others_parts_nobody() -> None:
    runs = [Run("a", "U8", (16,), BASE), Run("none", "U8", (0,), BASE + 4), Run("b", "U8", (8,), BASE + 8)]
    assert synthesize(runs).aliases.keys() == {"b"}


def test_devices_are_kept_apart() -> None:
    runs = [Run("a", "U8", (8,), BASE, -1), Run("b", "U8", (8,), BASE, 0)]
    assert len(synthesize(runs).runs) == 2


@pytest.mark.parametrize("name", ["", "a\0b", "模型/😀", 'a "b"\\\n', "x" * 100_000, "../../etc/passwd"])
def test_strange_names_are_names(name: str) -> None:
    found = synthesize([Run(name, "U8", (3,), BASE)])
    parsed = header.parse_header(content(found), found.size, FILE)
    assert [tensor.name for tensor in parsed.tensors] == [name]


def test_nothing_at_all() -> None:
    found = synthesize([])
    assert json.loads(found.header[8:]) == {}
    assert found.size == len(found.header)


@capability("safetensors")
def test_the_safetensors_library_reads_it(tmp_path: Path) -> None:
    import safetensors

    runs = [
        Run("w", "F32", (4, 2), BASE),
        Run("tied", "F32", (4, 2), BASE),
        Run("view", "I16", (3,), BASE + 8),
        Run("one", "U8", (20,), BASE + 100),
        Run("other", "U8", (20,), BASE + 110),
        Run("模型 😀", "F64", (), BASE + 200),
        Run("none", "BOOL", (0, 7), BASE + 208),
        Run("", "I8", (3,), BASE + 300),
    ]
    path = tmp_path / FILE
    found = synthesize(runs)
    path.write_bytes(content(found))
    with safetensors.safe_open(path, "np") as opened:
        assert set(opened.keys()) == {run.name for run in found.runs}
        for run in found.runs:
            tensor = opened.get_tensor(run.name)
            assert (tensor.shape, tensor.tobytes()) == (run.shape, memory_of(run))
