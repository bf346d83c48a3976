"""The rules of families of models: how their checkpoints are split over the ranks of a tensor-parallel group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mx_cli.base.errors import UsageError
from mx_cli.plan.shards import Rule, Rules

NAMES = ("llama", "qwen", "mistral", "mixtral", "deepseek")
_NATIVE = ("mistral", "mixtral")


def family_of(config: Mapping[str, Any]) -> str:
    """The family that a config.json is of; empty when none is known."""
    kind = str(_inner(config).get("model_type") or config.get("model_type") or "").lower()
    return next((name for name in sorted(NAMES, key=len, reverse=True) if kind.startswith(name)), "")


def built_in(name: str, config: Any) -> Rules:
    """The rules of a family; `config` is its config.json. Raises UsageError for an unknown family or config."""
    family = name.lower()
    if family not in NAMES:
        raise UsageError(
            f"no built-in rules for {name!r}", hint=f"there are: {', '.join(NAMES)}; or a rule file: --rules FILE"
        )
    heads, kv_heads = _heads(config)
    rules = _attention(heads, kv_heads)
    if family == "deepseek":
        rules = [*_latent_attention(heads), *rules]
    if family in _NATIVE:
        rules = [*rules, *_native(heads, kv_heads)]
    return Rules((*rules, *_EMBEDDINGS, *_ROUTERS, *_FEED_FORWARD))


def _inner(config: Any) -> Mapping[str, Any]:
    """Models with several towers describe the one of text by itself."""
    inner = config.get("text_config") if isinstance(config, Mapping) else None
    found = inner if isinstance(inner, Mapping) else config
    return found if isinstance(found, Mapping) else {}


def _heads(config: Any) -> tuple[int, int]:
    found = _inner(config)
    try:
        heads = int(found["num_attention_heads"])
        kv_heads = int(found.get("num_key_value_heads") or heads)
    except (KeyError, TypeError, ValueError):
        heads = kv_heads = 0
    if heads < 1 or kv_heads < 1:
        raise UsageError("the config does not say num_attention_heads", hint="rules of your own: a rule file")
    return heads, kv_heads


def _linear(glob: str, kind: str, parts: tuple[int, ...] = (1,), heads: tuple[int, ...] = ()) -> list[Rule]:
    """A matrix, its bias and the scales of a quantised one. Packed forms with axes of their own (GPTQ) match nothing."""
    return [Rule(f"{glob}.{what}", kind, None, parts, heads) for what in ("weight", "bias", "weight_scale*")]


def _attention(heads: int, kv_heads: int) -> list[Rule]:
    each = (heads, kv_heads, kv_heads)
    return [
        *_linear("*.qkv_proj", "col", each, each),
        *_linear("*.q_proj", "col", heads=(heads,)),
        *_linear("*.[kv]_proj", "col", heads=(kv_heads,)),
        # Fewer query heads than ranks are refused here: what comes out of them is added up.
        *_linear("*.o_proj", "row", heads=(heads,)),
    ]


def _latent_attention(heads: int) -> list[Rule]:
    """The low-rank halves are whole on every rank, the others are split by heads."""
    return [
        Rule("*.indexer.*", "replicate"),
        Rule("*.q_a_proj.*", "replicate"),
        Rule("*.kv_a_proj_with_mqa.*", "replicate"),
        # A block of 128 rows that one scale is for may span two heads.
        Rule("*.q_b_proj.weight_scale_inv", "col"),
        Rule("*.kv_b_proj.weight_scale_inv", "col"),
        *_linear("*.q_b_proj", "col", heads=(heads,)),
        *_linear("*.kv_b_proj", "col", heads=(heads,)),
        # The layers that predict further tokens.
        Rule("*.eh_proj.weight", "replicate"),
        Rule("*.shared_head.head.weight", "vocab"),
    ]


def _native(heads: int, kv_heads: int) -> list[Rule]:
    """The names of Mistral's own files."""
    return [
        *_linear("*.attention.wq", "col", heads=(heads,)),
        *_linear("*.attention.w[kv]", "col", heads=(kv_heads,)),
        *_linear("*.attention.wo", "row", heads=(heads,)),
        *_linear("*.feed_forward.w[13]", "col"),
        *_linear("*.feed_forward.w2", "row"),
        Rule("tok_embeddings.weight", "vocab"),
        Rule("output.weight", "vocab"),
    ]


_EMBEDDINGS = (
    Rule("*embed_tokens.weight", "vocab"),
    Rule("*lm_head.weight", "vocab"),
)
# Every rank asks the router, whose weights are small.
_ROUTERS = (
    Rule("*.gate.weight", "replicate"),
    Rule("*.shared_expert_gate.weight", "replicate"),
)
_FEED_FORWARD = (
    *_linear("*.gate_up_proj", "col", (1, 1)),
    *_linear("*.gate_proj", "col"),
    *_linear("*.up_proj", "col"),
    *_linear("*.down_proj", "row"),
    # Mixtral's experts.
    *_linear("*.experts.*.w[13]", "col"),
    *_linear("*.experts.*.w2", "row"),
)
