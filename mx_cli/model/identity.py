"""The identity: the string two processes compare before they exchange weights.

An identity is `mx1` + kind + `-` + the first 32 hex digits of SHA-256 over canonical JSON of
{kind, stage, weights, config, layout}. The kinds are different evidence and never compared with each other:

    content   mx1c-   what is in the checkpoint: its tensor table, and its config by meaning
    origin    mx1o-   where it came from: canonical URI and immutable revision
    config    mx1x-   a configuration alone: identifies no weights, a pull refuses it

`weights` of content: {"table": SHA-256 over canonical JSON of the rows [name, dtype, shape, blocks] sorted by name,
"tensors", "bytes"}. Rows and blocks: model.digest. `config`: model.hf_config, null where there is none. `layout`:
model.layout, empty for the stage checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mx_cli.base import canonical
from mx_cli.base.errors import UsageError
from mx_cli.model.digest import FILE_DTYPE, TensorDigest
from mx_cli.model.header import BITS

KINDS = {"content": "mx1c-", "origin": "mx1o-", "config": "mx1x-"}
"""Prefix of each kind, the strongest evidence first."""


@dataclass(frozen=True)
class Identity:
    """One identity with everything that went into it. Compare `id`s; name differences with `diff`."""

    kind: str
    stage: str
    weights: dict[str, Any] | None
    config: dict[str, Any] | None
    layout: dict[str, Any]

    @property
    def parts(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "stage": self.stage,
            "weights": self.weights,
            "config": self.config,
            "layout": self.layout,
        }

    @property
    def id(self) -> str:
        return KINDS[self.kind] + canonical.sha256(self.parts)[:32]

    def to_json(self) -> dict[str, Any]:
        return {"id": self.id, **self.parts}

    @classmethod
    def from_json(cls, document: Any) -> Identity:
        """Read a record. UsageError when it isn't one, or when its id isn't what its parts give."""
        if not isinstance(document, dict) or document.get("kind") not in KINDS:
            raise UsageError("not a record of an identity (no known kind)")
        weights, config, layout = document.get("weights"), document.get("config"), document.get("layout")
        well_formed = all(part is None or isinstance(part, dict) for part in (weights, config))
        if not well_formed or not isinstance(layout, dict) or not isinstance(document.get("stage"), str):
            raise UsageError("not a record of an identity (weights, config, layout or stage is missing or wrong)")
        identity = cls(document["kind"], document["stage"], weights, config, layout)
        if document.get("id", identity.id) != identity.id:
            raise UsageError(f"a damaged record of an identity (id {document['id']}, its parts give {identity.id})")
        return identity


def of_content(
    table: Iterable[TensorDigest],
    config: dict[str, Any] | None,
    stage: str = "checkpoint",
    layout: Mapping[str, Any] | None = None,
) -> Identity:
    """The content identity of a table (tables.whole_table) and a normalised config (hf_config.load), None without one."""
    rows = sorted(table)
    weights = {
        "table": canonical.sha256([row.to_json() for row in rows]),
        "tensors": len(rows),
        "bytes": sum(map(byte_size, rows)),
    }
    return Identity("content", stage, weights, config, dict(layout or {}))


def of_origin(uri: str, revision: str, stage: str = "checkpoint", layout: Mapping[str, Any] | None = None) -> Identity:
    """The origin identity; the caller gives a canonical URI without secrets and an immutable revision."""
    if not uri or not revision:
        raise UsageError(
            f"an origin identity needs a revision ({uri or 'no URI'})", hint="give URI@revision, or --revision"
        )
    return Identity("origin", stage, {"uri": uri, "revision": revision}, None, dict(layout or {}))


def of_shares(origin: Identity) -> Identity:
    """The identity of peers that hold the weights of an origin in parts, one rank each, whatever their number.

    None of them has them all, so it differs from the origin's own; of the layout the parallel size and the rank are left
    out, since the set of all ranks has the same weights in every one. The peers say themselves what their part is.
    """
    layout = {name: value for name, value in origin.layout.items() if name not in ("tp", "rank")}
    return Identity("origin", "loaded", origin.weights, None, {**layout, "shares": "any"})


def of_config(config: dict[str, Any], stage: str = "checkpoint", layout: Mapping[str, Any] | None = None) -> Identity:
    """The identity of a configuration alone."""
    return Identity("config", stage, None, config, dict(layout or {}))


def kind_of(text: str) -> str | None:
    """The kind of an identity string, None when it isn't one."""
    for kind, prefix in KINDS.items():
        digits = text.removeprefix(prefix)
        if digits != text and len(digits) == 32 and set(digits) <= set("0123456789abcdef"):
            return kind
    return None


def refuse_part(text: str) -> None:
    """Raises UsageError for a piece of an identity, as tables show them."""
    if kind_of(text) is None and text.startswith(tuple(KINDS.values())):
        raise UsageError(
            f"not a whole identity ({text}: expected 32 hexadecimal digits after the dash)",
            hint="mx hash MODEL prints it, and mx peers --json",
        )


def strongest_pair(left: Iterable[Identity], right: Iterable[Identity]) -> tuple[Identity, Identity] | None:
    """The two of the strongest kind that both sides know; None when they are not comparable."""
    lefts, rights = {one.kind: one for one in left}, {other.kind: other for other in right}
    return next(((lefts[kind], rights[kind]) for kind in KINDS if kind in lefts and kind in rights), None)


def diff(left: Identity, right: Identity) -> list[tuple[str, Any, Any]]:
    """(field path, left value, right value) of what differs, None for a missing field; empty when they are equal."""
    return list(_differences("", left.parts, right.parts))


def _differences(path: str, left: Any, right: Any) -> Iterable[tuple[str, Any, Any]]:
    if isinstance(left, dict) and isinstance(right, dict):
        for key in sorted(left.keys() | right.keys()):
            yield from _differences(f"{path}.{key}" if path else key, left.get(key), right.get(key))
    elif isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        for index, (one, other) in enumerate(zip(left, right, strict=True)):
            yield from _differences(f"{path}[{index}]", one, other)
    elif canonical.dumps(left) != canonical.dumps(right):
        yield path, left, right


def diff_tables(left: Iterable[TensorDigest], right: Iterable[TensorDigest]) -> list[tuple[str, Any, Any]]:
    """Like diff, for two tensor tables: which tensors are missing, differ in dtype or shape, or in a block."""
    lefts, rights = {row.name: row for row in left}, {row.name: row for row in right}
    found: list[tuple[str, Any, Any]] = []
    for name in sorted(lefts.keys() | rights.keys()):
        one, other = lefts.get(name), rights.get(name)
        if one is None or other is None:
            found.append((f"tensors.{name}", one and _kind(one), other and _kind(other)))
        elif (one.dtype, one.shape) != (other.dtype, other.shape):
            found.append((f"tensors.{name}", _kind(one), _kind(other)))
        elif one.blocks != other.blocks:
            pairs = enumerate(zip(one.blocks, other.blocks, strict=False))
            at = next((index for index, (mine, theirs) in pairs if mine != theirs), None)
            if at is None:
                found.append((f"tensors.{name}.blocks", len(one.blocks), len(other.blocks)))
            else:
                found.append((f"tensors.{name}.blocks[{at}]", one.blocks[at], other.blocks[at]))
    return found


def _kind(row: TensorDigest) -> str:
    return f"{row.dtype}{list(row.shape)}"


def byte_size(row: TensorDigest) -> int:
    """Bytes of a row's tensor (or file); 0 for a dtype that isn't known."""
    count = BITS.get(row.dtype, 8 if row.dtype == FILE_DTYPE else 0)
    for dimension in row.shape:
        count *= dimension
    return count // 8
