"""The files of one rank: every tensor once, at the places that the headers say, in parts of a bounded size."""

from __future__ import annotations

from mx_cli.model.header import parse_header
from mx_cli.model.part_files import part_files

TENSORS = {
    "a": ("BF16", (3, 5)),
    "b": ("F32", (4,)),
    "empty": ("U8", (0, 7)),
    "large": ("U8", (100,)),
    "scalar": ("F64", ()),
}


def test_each_tensor_is_where_its_header_says() -> None:
    (found,) = part_files(TENSORS, 3, {"format": "pt"})
    assert found.name == "model-rank-3-part-0.safetensors"
    header = parse_header(found.header, found.size, found.name)
    assert {one.name: (one.dtype, one.shape) for one in header.tensors} == TENSORS
    assert {one.name: one.start for one in header.tensors} == found.starts
    assert found.size == len(found.header) + 30 + 16 + 100 + 8


def test_a_part_ends_before_it_is_too_large() -> None:
    found = part_files(TENSORS, 0, {}, most=50)
    assert [list(part.starts) for part in found] == [["a", "b", "empty"], ["large"], ["scalar"]]
    assert [part.name[-13:] for part in found] == [f"{number}.safetensors" for number in range(3)]
    for part in found:
        parse_header(part.header, part.size, part.name)


def test_nothing() -> None:
    assert part_files({}, 0, {}) == []
