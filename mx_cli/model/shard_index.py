"""`model.safetensors.index.json`: which shard holds which tensor, as somebody else wrote it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from mx_cli.base.errors import IntegrityError
from mx_cli.model import json_strict, paths

_NAME = re.compile(r"\.(safetensors|bin|pth|pt)\.index(\.[\w-]+)?\.json$")
_NUMBERED = re.compile(r"(.*-)(\d{2,6})-of-(\d{2,6})(\.\w+)")
_ENCODED = re.compile(r"%(2f|2e|5c|00|25)", re.IGNORECASE)
_MAX_VALUES = 2_000_000


@dataclass(frozen=True)
class Index:
    """A shard index. `shards` and the values of `weight_map` are paths in the checkpoint, like `name`."""

    name: str
    folder: str
    shards: tuple[str, ...]
    weight_map: dict[str, str]


def is_index(path: str) -> bool:
    return _NAME.search(path) is not None


def read_index(name: str, data: bytes) -> Index:
    """The index file `name`. IntegrityError when it isn't one, or names a file outside of its own folder."""
    document = json_strict.parse(data, name, error=IntegrityError, max_values=_MAX_VALUES)
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise IntegrityError(f"not a shard index ({name}: no weight_map)")
    folder = name.rpartition("/")[0]
    if any(map(_fault, {shard if isinstance(shard, str) else None for shard in weight_map.values()})):
        wrong = [f"{tensor!r} -> {shard!r}: {why}" for tensor, shard in weight_map.items() if (why := _fault(shard))]
        raise IntegrityError(f"an index that names what can't be its shard ({name}: {paths.some(wrong)[:600]})")
    places = {shard: f"{folder}/{shard}" if folder else shard for shard in set(weight_map.values())}
    mapped = {tensor: places[shard] for tensor, shard in weight_map.items()}
    return Index(name, folder, tuple(sorted(places.values())), mapped)


def check_complete(index: Index, files: Collection[str]) -> None:
    have = files if isinstance(files, (set, frozenset, dict)) else set(files)
    missing = [shard for shard in index.shards if shard not in have]
    if missing:
        hint = "an index alone holds no weights: give what it is in, where its shards are too" if len(have) == 1 else ""
        raise _incomplete(index.name, missing, len(index.shards), hint)


def check_numbered(weights: Iterable[str], files: Collection[str]) -> None:
    """The same for weights without an index, whose names say how many there are: `model-00001-of-00003.safetensors`.

    Counted from 1, or from 0 where there is a 0.
    """
    sets: dict[tuple[str, str, str], set[int]] = {}
    for path in weights:
        if match := _NUMBERED.fullmatch(path):
            before, number, total, after = match.groups()
            sets.setdefault((before, total, after), set()).add(int(number))
    for (before, total, after), numbers in sets.items():
        first = 0 if 0 in numbers else 1
        names = [f"{before}{n:0{len(total)}}-of-{total}{after}" for n in range(first, first + int(total))]
        missing = [name for name in names if name not in files]
        if missing:
            raise _incomplete(f"{before}*-of-{total}{after}", missing, len(names))


def _incomplete(what: str, missing: list[str], total: int, hint: str = "") -> IntegrityError:
    return IntegrityError(
        f"shards are missing ({what}: {len(missing)} of {total} shards not there: {paths.some(missing)})",
        hint=hint or "the checkpoint is incomplete where it was published; --include chooses other files",
    )


def check_homes(index: Index, homes: Iterable[tuple[str, Iterable[str]]]) -> None:
    """IntegrityError when a tensor of the index doesn't lie in the shard that the index names.

    `homes`: (shard, names of its tensors). What shards hold beyond the index is no error.
    """
    held = {path: set(names) for path, names in homes}
    wrong = [
        f"{tensor!r} is not in {shard}"
        for tensor, shard in index.weight_map.items()
        if shard in held and tensor not in held[shard]
    ]
    if wrong:
        raise IntegrityError(f"an index that points to the wrong shard ({index.name}: {paths.some(wrong)})")


def _fault(shard: object) -> str | None:
    if not isinstance(shard, str):
        return "not a name"
    if "\\" in shard:
        return "backslash in the name"
    if _ENCODED.search(shard):
        return "encoded separator in the name"
    if ":" in shard:
        return "a URL or a drive, not a name"
    if not shard.isprintable():
        return "NUL or another control character in the name"
    return paths.fault(shard)
