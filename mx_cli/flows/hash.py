"""`mx hash`: the identities of a model, from the strongest evidence that is there."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mx_cli.base import redact
from mx_cli.base.cancel import Stop
from mx_cli.base.errors import NotFound, UsageError
from mx_cli.flows.digest_memory import DigestMemory
from mx_cli.flows.local_model import LocalModel
from mx_cli.model import identity, json_strict
from mx_cli.model.digest import TensorDigest
from mx_cli.model.identity import KINDS, Identity

Resolve = Callable[[str, str | None], tuple[str, str]]
CHECKPOINT: tuple[str, dict[str, Any]] = ("checkpoint", {})
THREADS = 4


@dataclass(frozen=True)
class HashResult:
    """What is known about a model. `model` is what the user named: information, part of no identity.

    `identities`: one of each kind that is known, the strongest first. `table`: the tensors, where weights were read.
    `left_out`: weight files beside the weight set, (path, size, reason). `bytes_read`: not remembered or known before.
    """

    model: str
    identities: tuple[Identity, ...]
    table: tuple[TensorDigest, ...] = ()
    left_out: tuple[tuple[str, int, str], ...] = ()
    bytes_read: int = 0

    def choose(self, kind: str | None = None) -> Identity:
        """The identity to print: the strongest, or that of `kind`. UsageError for a kind that isn't known."""
        if kind is None:
            return self.identities[0]
        for known in self.identities:
            if known.kind == kind:
                return known
        names = ", ".join(known.kind for known in self.identities)
        raise UsageError(f"no {kind} identity of {self.model} (known: {names})", hint=_HINTS.get(kind, ""))

    def to_json(self, kind: str | None = None) -> dict[str, Any]:
        """The document of --json; read_record reads it back."""
        chosen = self.choose(kind)
        return {
            "schema": 1,
            "identity": chosen.id,
            "kind": chosen.kind,
            "stage": chosen.stage,
            "config_only": chosen.kind == "config",
            "model": redact.text(self.model),
            "identities": [known.to_json() for known in self.identities],
            "left_out": [{"path": path, "size": size, "reason": reason} for path, size, reason in self.left_out],
            "bytes_read": self.bytes_read,
        }


@dataclass(frozen=True)
class Comparison:
    """Two models side by side. `kind` is None when they are not comparable; `differences` as in identity.diff."""

    kind: str | None
    equal: bool
    differences: tuple[tuple[str, Any, Any], ...] = ()

    def to_json(self) -> dict[str, Any]:
        rows = [{"field": field, "left": left, "right": right} for field, left, right in self.differences]
        return {
            "schema": 1,
            "kind": self.kind,
            "comparable": self.kind is not None,
            "equal": self.equal,
            "differences": rows,
        }


_HINTS = {
    "content": 'content is known where the bytes are: mx hash "$(mx prefetch URI)"',
    "origin": "origin is known for a URI, or a snapshot in mx's cache",
    "config": "config needs a config.json",
}


def hash_model(
    model: str,
    *,
    layout: tuple[str, dict[str, Any]] = CHECKPOINT,
    kind: str | None = None,
    content: bool = True,
    revision: str | None = None,
    memory: Path | None = None,
    verify: bool = False,
    known_rows: Mapping[str, Sequence[TensorDigest]] | None = None,
    known_origin: tuple[str, str] | None = None,
    resolve_origin: Resolve | None = None,
    threads: int = THREADS,
    stop: Stop | None = None,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> HashResult:
    """The identities of a local model or of an origin.

    `model`: a directory, a config.json, a weight file, or a URI. A URI (or org/name where no such path is) goes to
    `resolve_origin(uri, revision)`, which gives its canonical form and its immutable revision; `revision` is for it
    alone. Weights are read unless `content` is false or `kind` needs none, `threads` files at once with 4 MiB each.

    `known_rows` (by path in the checkpoint, e.g. from a snapshot's manifest) and the memory below `memory` save
    reading; `verify` reads all the same. `known_origin`: (canonical URI, revision) of a snapshot. `layout`: what
    model.layout.layout returns. `on_bytes` is called from several threads.

    Blocks; idempotent. Raises UsageError, NotFound, IntegrityError and FilesystemRefused, and the reason of `stop`.
    """
    if kind is not None and kind not in KINDS:
        raise UsageError(f"unknown kind (--kind {kind!r}: expected {', '.join(KINDS)})")
    if not is_local(model):
        return _of_uri(model, revision, resolve_origin, layout)
    if revision is not None:
        raise UsageError(f"--revision is for a URI ({model} is a path)")
    found = LocalModel(model)
    config = found.config()
    identities = []
    table: tuple[TensorDigest, ...] = ()
    read: list[int] = []

    def count(size: int) -> None:
        read.append(size)
        on_bytes(size)

    if kind == "content" or (content and kind is None and found.selection):
        remembered = DigestMemory(memory, forgetful=verify) if memory else None
        known = {} if verify else known_rows or {}
        table = found.table(remembered, known, threads=threads, stop=stop, on_bytes=count)
        identities.append(identity.of_content(table, config, *layout))
    if known_origin:
        identities.append(identity.of_origin(*known_origin, *layout))
    if config is not None:
        identities.append(identity.of_config(config, *layout))
    if not identities:
        raise NotFound(
            f"no config.json ({model}), and its weights are not to be read", hint="leave out --kind and --no-content"
        )
    left_out = found.selection.left_out if found.selection else ()
    return HashResult(model, tuple(identities), table, left_out, sum(read))


def is_local(model: str) -> bool:
    """Whether a model is meant as a path: it exists, or is written as one."""
    if "://" in model:
        return False
    if not model:
        raise UsageError("an empty model name", hint="give a directory, a file or a URI")
    written_as_path = model.startswith(("/", "./", "../", "~")) or model in (".", "..")
    try:
        return written_as_path or os.path.lexists(model)
    except ValueError:
        return True


def _of_uri(uri: str, revision: str | None, resolve: Resolve | None, layout: tuple[str, dict[str, Any]]) -> HashResult:
    if resolve is None:
        raise NotFound(f"no such file or directory ({uri})")
    canonical_uri, fixed = resolve(uri, revision)
    return HashResult(uri, (identity.of_origin(canonical_uri, fixed, *layout),))


def read_record(data: bytes, name: str) -> tuple[Identity, ...] | None:
    """The identities in a saved --json document, None when the JSON file `name` is something else (a config)."""
    document = json_strict.parse(data, name)
    records = document.get("identities") if isinstance(document, dict) else None
    if not isinstance(records, list) or not records or "schema" not in document:
        return None
    return tuple(Identity.from_json(record) for record in records)


def saved_record(path: str) -> HashResult | None:
    """The result that a file keeps, None when `path` is no JSON file with one: then it is a model for hash_model."""
    if not path.endswith(".json") or not os.path.isfile(path):
        return None
    identities = read_record(LocalModel(path).read_small(os.path.basename(path)), path)
    return HashResult(path, identities) if identities else None


def compare(left: HashResult, right: HashResult, kind: str | None = None) -> Comparison:
    """Compare by the strongest kind that both know, or by `kind`; tensors are named where both tables are known."""
    lefts = [known for known in left.identities if kind in (None, known.kind)]
    rights = [known for known in right.identities if kind in (None, known.kind)]
    pair = identity.strongest_pair(lefts, rights)
    if pair is None:
        return Comparison(None, False)
    one, other = pair
    differences = identity.diff(one, other)
    if one.kind == "content" and left.table and right.table:
        differences += identity.diff_tables(left.table, right.table)
    return Comparison(one.kind, one.id == other.id, tuple(differences))
