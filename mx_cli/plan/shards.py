"""Which part of each tensor one rank of a tensor-parallel group needs.

A rule is `[glob, kind, dim, parts, heads]`; the first whose glob matches a tensor's name decides:

    kind    "col" (split dimension 0 by default), "row" (dimension 1) or "replicate"
    dim     the dimension that is split; null for the kind's default
    parts   sizes, relative to each other, of tensors that are fused along the dimension (qkv, gate_up); each is split by
            itself. Left out: one part
    heads   for each part how many pieces cannot be split: fewer heads than ranks are replicated over neighbouring ranks
            (grouped-query attention). Left out or 0: any row is a place to split

`{"rules": [...], "default": "error" | "replicate"}`: what no rule matches is replicated when it has fewer than two
dimensions, and an error otherwise unless the default says so.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mx_cli.base.errors import UsageError
from mx_cli.plan.ranges import Span

KINDS = {"col": 0, "row": 1, "replicate": None}


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
        try:
            glob, kind, dim, parts, heads = [*list(row), None, None, None][:5]
            rule = cls(str(glob), str(kind), dim, tuple(map(int, parts or (1,))), tuple(map(int, heads or ())))
        except (TypeError, ValueError):
            raise UsageError(f"not a rule: {row!r}", hint='["*.q_proj.weight", "col", 0]') from None
        if rule.kind not in KINDS or not (dim is None or (isinstance(dim, int) and dim >= 0)):
            raise UsageError(f"not a rule: {row!r}", hint=f"kinds: {', '.join(KINDS)}; a dimension counts from 0")
        if any(part < 1 for part in rule.parts) or any(count < 0 for count in rule.heads):
            raise UsageError(f"not a rule: {row!r} (parts and heads are counts)")
        if rule.heads and len(rule.heads) != len(rule.parts):
            raise UsageError(f"not a rule: {row!r} ({len(rule.parts)} parts, {len(rule.heads)} numbers of heads)")
        return rule


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's part of a tensor: the `spans` of dimension `dim`, in order; None for all of it."""

    shape: tuple[int, ...]
    dim: int | None = None
    spans: tuple[Span, ...] = ()

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the rank's own tensor."""
        if self.dim is None:
            return self.shape
        count = sum(end - start for start, end in self.spans)
        return (*self.shape[: self.dim], count, *self.shape[self.dim + 1 :])

    def runs(self, bits: int) -> Iterator[tuple[int, int]]:
        """(first byte in the whole tensor, bytes) of each contiguous run, in the order of the rank's own tensor.

        `bits` of an element. Raises UsageError when a split falls into the middle of a byte.
        """
        if self.dim is None:
            yield 0, _bytes(_product(self.shape) * bits)
            return
        inner = _product(self.shape[self.dim + 1 :]) * bits
        pitch = self.shape[self.dim] * inner
        for outer in range(_product(self.shape[: self.dim])):
            for start, end in self.spans:
                yield _bytes(outer * pitch + start * inner), _bytes((end - start) * inner)


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
        if unknown := sorted(set(data) - {"rules", "default"}):
            raise UsageError(f"not a rule file: unknown keys {', '.join(unknown)}")
        default = data.get("default", "error")
        if default not in ("error", "replicate"):
            raise UsageError(f"not a default: {default!r}", hint="error or replicate")
        return cls(tuple(map(Rule.from_json, data["rules"])), default == "replicate")

    def share(self, name: str, shape: tuple[int, ...], rank: int, ranks: int) -> Share:
        """The part of rank `rank` of `ranks`. Raises UsageError for what no rule covers or cannot be split evenly."""
        rule = next((rule for rule in self.rules if fnmatch.fnmatchcase(name, rule.glob)), None)
        if rule is None:
            if len(shape) > 1 and not self.replicate_rest:
                raise UsageError(
                    f"no rule says how {name} {list(shape)} is split", hint='add one, or "default": "replicate"'
                )
            return Share(shape)
        dim = rule.dim if rule.dim is not None else KINDS[rule.kind]
        if rule.kind == "replicate" or dim is None or ranks == 1:
            return Share(shape)
        if dim >= len(shape):
            # A bias of a row-parallel layer is added once, after the sum: every rank has it.
            if rule.kind == "row" and len(shape) == 1:
                return Share(shape)
            raise UsageError(f"{name} {list(shape)} has no dimension {dim} (rule {rule.glob!r})")
        return Share(shape, dim, tuple(_split(name, shape[dim], rule, rank, ranks)))


def _split(name: str, length: int, rule: Rule, rank: int, ranks: int) -> Iterator[Span]:
    unit, rest = divmod(length, sum(rule.parts))
    if rest:
        raise UsageError(f"{name}: {length} does not divide into parts {list(rule.parts)} (rule {rule.glob!r})")
    at = 0
    for part, heads in zip(rule.parts, rule.heads or (0,) * len(rule.parts), strict=True):
        size = part * unit
        start, end = _piece(name, size, heads or size, rank, ranks)
        yield at + start, at + end
        at += size


def _piece(name: str, size: int, heads: int, rank: int, ranks: int) -> Span:
    """The rank's heads of one part, in elements."""
    if size % heads:
        raise UsageError(f"{name}: {size} does not divide into {heads} heads")
    width = size // heads
    if heads >= ranks:
        if heads % ranks:
            raise UsageError(f"{name}: {heads} cannot be split evenly over {ranks} ranks")
        each = heads // ranks
        return rank * each * width, (rank + 1) * each * width
    if ranks % heads:
        raise UsageError(f"{name}: {heads} heads cannot be replicated evenly over {ranks} ranks")
    head = rank * heads // ranks
    return head * width, (head + 1) * width


def _product(values: Sequence[int]) -> int:
    found = 1
    for value in values:
        found *= value
    return found


def _bytes(bits: int) -> int:
    if bits % 8:
        raise UsageError("a split falls into the middle of a byte")
    return bits // 8


NAMES = ("llama", "qwen", "mistral", "mixtral", "deepseek")


def built_in(name: str, config: Any) -> Rules:
    """The rules of a family of models; `config` is its config.json. Raises UsageError for an unknown family or config."""
    if name not in NAMES:
        raise UsageError(f"no built-in rules for {name!r}", hint=f"there are: {', '.join(NAMES)}; or give a rule file")
    try:
        heads = int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UsageError("the config does not say num_attention_heads", hint="rules of your own: a rule file") from None
    q, kv = (heads,), (kv_heads,)
    rules = [
        Rule("*embed_tokens.weight", "col"),
        Rule("*lm_head.weight", "col"),
        Rule("*.qkv_proj.*", "col", 0, (heads, kv_heads, kv_heads), (heads, kv_heads, kv_heads)),
        Rule("*.q_proj.*", "col", 0, (1,), q),
        Rule("*.[kv]_proj.*", "col", 0, (1,), kv),
        Rule("*.o_proj.weight", "row", 1, (1,), q),
        Rule("*.gate_up_proj.*", "col", 0, (1, 1)),
        Rule("*.gate_proj.*", "col"),
        Rule("*.up_proj.*", "col"),
        Rule("*.down_proj.weight", "row"),
        # Mixtral's experts; routers are small, and every rank needs all of them.
        Rule("*.experts.*.w[13].weight", "col"),
        Rule("*.experts.*.w2.weight", "row"),
        Rule("*.gate.weight", "replicate"),
        Rule("*.shared_expert_gate.weight", "replicate"),
        # DeepSeek's latent attention: the low-rank halves are whole on every rank.
        Rule("*.q_a_proj.*", "replicate"),
        Rule("*.kv_a_proj_with_mqa.*", "replicate"),
        Rule("*.[qk]*_b_proj.weight", "col", 0, (1,), q),
    ]
    return Rules(tuple(rules))
