"""Which part of each tensor one rank of a tensor-parallel group needs.

A rule is `[glob, kind, dim, parts, heads]`; the first whose glob matches a tensor's name decides:

    kind    "col" (split dimension 0 by default), "row" (dimension 1), "vocab" (dimension 0) or "replicate"
    dim     the dimension that is split; null for the kind's default
    parts   sizes, relative to each other, of tensors that are fused along the dimension (qkv, gate_up); each is split by
            itself. Left out: one part
    heads   for each part how many pieces cannot be split; of "col", fewer heads than ranks are replicated over neighbouring
            ranks (grouped-query attention). Left out or 0: any row is a place to split

"vocab" splits as if the length were a multiple of 64, as engines pad it: the last ranks may have less than the first ones.
A dimension of length 1 is never split (the scale of a whole tensor, or of its rows): every rank has it.

`{"rules": [...], "default": "error" | "replicate"}`: what no rule matches is replicated when it has fewer than two
dimensions, and an error otherwise unless the default says so.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from mx_cli.base.errors import UsageError
from mx_cli.model.share import Share
from mx_cli.plan.ranges import Span

KINDS = {"col": 0, "row": 1, "vocab": 0, "replicate": None}
VOCAB_PADDING = 64


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of a rule file. `dim` None: the kind's own."""

    glob: str
    kind: str
    dim: int | None = None
    parts: tuple[int, ...] = (1,)
    heads: tuple[int, ...] = ()

    @classmethod
    def from_json(cls, row: Any) -> Rule:
        """Raises UsageError for anything but a rule."""
        fault = UsageError(f"not a rule: {row!r}", hint='["*.q_proj.weight", "col", 0]')
        if not isinstance(row, (list, tuple)) or not 2 <= len(row) <= 5:
            raise fault
        glob, kind, dim, parts, heads = [*row, None, None, None][:5]
        if not isinstance(glob, str) or kind not in KINDS or not (dim is None or _count(dim)):
            raise UsageError(f"not a rule: {row!r}", hint=f"a glob, then {', '.join(KINDS)}; a dimension counts from 0")
        if not all(
            isinstance(one, (list, tuple, type(None))) and all(map(_count, one or ())) for one in (parts, heads)
        ):
            raise UsageError(f"not a rule: {row!r} (parts and heads are lists of counts)")
        rule = cls(glob, kind, dim, tuple(parts or (1,)), tuple(heads or ()))
        if 0 in rule.parts:
            raise UsageError(f"not a rule: {row!r} (a part of nothing)")
        if rule.heads and len(rule.heads) != len(rule.parts):
            raise UsageError(f"not a rule: {row!r} ({len(rule.parts)} parts, {len(rule.heads)} numbers of heads)")
        return rule

    @property
    def along(self) -> int | None:
        """The dimension that is split."""
        return self.dim if self.dim is not None else KINDS[self.kind]


@dataclass(frozen=True)
class Rules:
    """Rules in order, and what to do with the rest."""

    rules: tuple[Rule, ...]
    replicate_rest: bool = False

    @classmethod
    def from_json(cls, data: Any) -> Rules:
        """Raises UsageError for anything but a rule file."""
        if not isinstance(data, dict) or not isinstance(data.get("rules"), list):
            raise UsageError("not a rule file: an object with the list `rules` is expected")
        if unknown := sorted(map(str, set(data) - {"rules", "default"})):
            raise UsageError(f"not a rule file: unknown keys {', '.join(unknown)}")
        default = data.get("default", "error")
        if default not in ("error", "replicate"):
            raise UsageError(f"not a default: {default!r}", hint="error or replicate")
        return cls(tuple(map(Rule.from_json, data["rules"])), default == "replicate")

    def share(self, name: str, shape: tuple[int, ...], rank: int, ranks: int) -> Share:
        """The part of rank `rank` of `ranks`. Raises UsageError for what no rule covers or cannot be split evenly."""
        rule, dim = self._splitting(name, shape, ranks)
        if rule is None or dim is None:
            return Share(shape)
        return Share(shape, dim, tuple(_split(name, shape[dim], rule, rank, ranks)))

    def share_of_local(self, name: str, local: tuple[int, ...], rank: int, ranks: int) -> Share:
        """The same from the shape of the rank's own tensor. A vocabulary is taken to divide evenly, and one row to be all.

        Raises UsageError also for a shape that no rank's tensor can have.
        """
        rule, dim = self._splitting(name, local, ranks)
        if rule is None or dim is None:
            return Share(local)
        # Of each part a rank has one of min(heads, ranks) pieces.
        heads = rule.heads or (0,) * len(rule.parts)
        pieces = (Fraction(part, min(few or ranks, ranks)) for part, few in zip(rule.parts, heads, strict=True))
        length = local[dim] * sum(rule.parts) / sum(pieces, Fraction(0))
        fault = UsageError(f"{name} {list(local)} is not what rank {rank}/{ranks} has by the rule {rule.glob!r}")
        if length.denominator != 1:
            raise fault
        try:
            share = self.share(name, (*local[:dim], int(length), *local[dim + 1 :]), rank, ranks)
        except UsageError:
            raise fault from None
        if share.local_shape != local:
            raise fault
        return share

    def _splitting(self, name: str, shape: tuple[int, ...], ranks: int) -> tuple[Rule | None, int | None]:
        """The rule and the dimension by which a tensor is split; (None, None) for one that every rank has whole."""
        rule = next((rule for rule in self.rules if fnmatch.fnmatchcase(name, rule.glob)), None)
        if rule is None:
            if len(shape) > 1 and not self.replicate_rest:
                raise UsageError(
                    f"no rule says how {name} {list(shape)} is split",
                    hint='a rule file has one, or "default": "replicate": --rules FILE',
                )
            return None, None
        dim = rule.along
        if dim is None or rule.kind == "replicate" or ranks == 1 or not shape:
            return None, None
        if dim >= len(shape):
            # A bias of a row-parallel layer is added once, after the sum: every rank has it.
            if rule.kind == "row" and len(shape) == 1:
                return None, None
            raise UsageError(f"{name} {list(shape)} has no dimension {dim} (rule {rule.glob!r})")
        return (None, None) if shape[dim] == 1 else (rule, dim)


def _split(name: str, length: int, rule: Rule, rank: int, ranks: int) -> Iterator[Span]:
    if rule.kind == "vocab":
        padded = -(-length // VOCAB_PADDING) * VOCAB_PADDING
        if padded % ranks:
            raise UsageError(f"{name}: {padded} rows (padded) cannot be split evenly over {ranks} ranks")
        each = padded // ranks
        yield min(length, rank * each), min(length, (rank + 1) * each)
        return
    unit, rest = divmod(length, sum(rule.parts))
    if rest:
        raise UsageError(f"{name}: {length} does not divide into parts {list(rule.parts)} (rule {rule.glob!r})")
    at = 0
    for part, heads in zip(rule.parts, rule.heads or (0,) * len(rule.parts), strict=True):
        size = part * unit
        start, end = _piece(name, size, heads, rule, rank, ranks)
        yield at + start, at + end
        at += size


def _piece(name: str, size: int, heads: int, rule: Rule, rank: int, ranks: int) -> Span:
    """The rank's heads of one part, in elements."""
    pieces = heads or size
    if pieces and size % pieces:
        raise UsageError(f"{name}: {size} does not divide into {heads} heads (rule {rule.glob!r})")
    if pieces % ranks == 0:
        each = size // ranks
        return rank * each, (rank + 1) * each
    if heads and heads < ranks and ranks % heads == 0 and rule.kind == "col":
        width = size // heads
        head = rank * heads // ranks
        return head * width, (head + 1) * width
    what = f"{heads} heads" if heads else f"{size}"
    raise UsageError(f"{name}: {what} cannot be split evenly over {ranks} ranks (rule {rule.glob!r})")


def _count(value: Any) -> bool:
    return type(value) is int and value >= 0
