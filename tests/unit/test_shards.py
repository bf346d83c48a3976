"""Which part of each tensor a rank needs: rules, spans, runs, and the families of models."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mx_cli.base.errors import IntegrityError, UsageError
from mx_cli.model.holding import Holding, start_key
from mx_cli.model.manifest import FileRecord, Manifest
from mx_cli.model.share import Share
from mx_cli.plan.families import NAMES, built_in, family_of
from mx_cli.plan.ranges import merge, total
from mx_cli.plan.shards import Rule, Rules

RANKS = st.sampled_from([1, 2, 3, 4, 8])


@st.composite
def cases(draw: st.DrawFn) -> tuple[Rule, tuple[int, ...], int]:
    """A rule, a shape that it splits, and a number of ranks."""
    ranks = draw(RANKS)
    dim = draw(st.integers(0, 2))
    parts = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    if draw(st.booleans()):
        heads = tuple(part * ranks * draw(st.integers(1, 2)) for part in parts)
        unit = math.lcm(*heads) * draw(st.integers(2, 3))
    else:
        heads = ()
        unit = ranks * draw(st.integers(2, 3))
    shape = [draw(st.integers(1, 4)) for _ in range(3)]
    shape[dim] = unit * sum(parts)
    return Rule("*", "col", dim, parts, heads), tuple(shape), ranks


@given(cases())
def test_the_ranks_cover_each_index_once(case: tuple[Rule, tuple[int, ...], int]) -> None:
    rule, shape, ranks = case
    shares = [Rules((rule,)).share("w", shape, rank, ranks) for rank in range(ranks)]
    if ranks == 1:
        assert shares == [Share(shape)]
        return
    dim = rule.along
    assert dim is not None
    spans = [span for share in shares for span in share.spans]
    assert merge(spans) == [(0, shape[dim])]
    assert total(spans) == shape[dim]
    assert all(share.local_shape == shares[0].local_shape for share in shares)


@settings(deadline=None)
@given(cases(), st.sampled_from([8, 16, 32]))
def test_runs_are_what_slicing_gives(case: tuple[Rule, tuple[int, ...], int], bits: int) -> None:
    torch = pytest.importorskip("torch")
    rule, shape, ranks = case
    step = bits // 8
    whole = torch.arange(math.prod(shape) * step, dtype=torch.int32).reshape(*shape, step)
    flat = whole.reshape(-1)
    for rank in range(ranks):
        share = Rules((rule,)).share("w", shape, rank, ranks)
        expected = whole
        if share.dim is not None:
            expected = torch.cat([whole.narrow(share.dim, a, b - a) for a, b in share.spans], share.dim)
        runs = [flat[start : start + length] for start, length in share.runs(bits)]
        assert tuple(expected.shape[:-1]) == share.local_shape
        assert torch.equal(torch.cat(runs), expected.reshape(-1))


@given(cases())
def test_a_ranks_own_shape_tells_the_whole_one(case: tuple[Rule, tuple[int, ...], int]) -> None:
    rule, shape, ranks = case
    rules = Rules((rule,))
    for rank in range(ranks):
        share = rules.share("w", shape, rank, ranks)
        assert rules.share_of_local("w", share.local_shape, rank, ranks) == share


@pytest.mark.parametrize(("heads", "ranks"), [(2, 4), (2, 8), (1, 4), (4, 4), (8, 4)])
def test_few_heads_are_replicated_over_neighbours(heads: int, ranks: int) -> None:
    rules = Rules((Rule("*", "col", 0, (1,), (heads,)),))
    shares = [rules.share("k", (heads * 16, 32), rank, ranks) for rank in range(ranks)]
    for rank, share in enumerate(shares):
        first = rank * heads // ranks
        assert share.spans == ((first * 16, (first + max(1, heads // ranks)) * 16),)
        assert rules.share_of_local("k", share.local_shape, rank, ranks) == share


def test_a_fused_qkv_keeps_its_heads_together() -> None:
    rules = Rules((Rule("*", "col", 0, (8, 2, 2), (8, 2, 2)),))
    share = rules.share("qkv", (12 * 16, 4), 3, 4)
    assert share.spans == ((96, 128), (144, 160), (176, 192))
    assert rules.share_of_local("qkv", share.local_shape, 3, 4) == share


def test_a_vocabulary_is_split_as_if_it_were_padded() -> None:
    rules = Rules((Rule("*", "vocab"),))
    spans = [rules.share("embed", (50257, 8), rank, 4).spans for rank in range(4)]
    assert spans == [((0, 12576),), ((12576, 25152),), ((25152, 37728),), ((37728, 50257),)]
    assert rules.share("embed", (65, 8), 3, 4).spans == ((65, 65),)
    assert rules.share_of_local("embed", (16, 8), 1, 4) == rules.share("embed", (64, 8), 1, 4)


ERRORS: list[tuple[list[Any], tuple[int, ...], int, str]] = [
    (["*", "col"], (7, 4), 2, "7 cannot be split evenly over 2 ranks"),
    (["*", "col", 0, None, [6]], (96, 4), 4, "6 heads cannot be split evenly over 4"),
    (["*", "col", 0, None, [5]], (96, 4), 4, "96 does not divide into 5 heads"),
    (["*", "col", 0, [1, 2]], (8, 4), 4, "8 does not divide into parts [1, 2]"),
    (["*", "col", 3], (8, 4), 4, "has no dimension 3"),
    (["*", "row", 1, None, [2]], (8, 8), 4, "2 heads cannot be split evenly over 4"),
    (["other", "col"], (8, 4), 4, "no rule says how"),
]


@pytest.mark.parametrize(("row", "shape", "ranks", "what"), ERRORS)
def test_errors_name_the_tensor_and_the_rule(row: list[Any], shape: tuple[int, ...], ranks: int, what: str) -> None:
    with pytest.raises(UsageError) as error:
        Rules.from_json({"rules": [row]}).share("the.tensor", shape, 1, ranks)
    assert "the.tensor" in str(error.value)
    assert what in str(error.value)
    if row[0] == "*":
        assert "'*'" in str(error.value)


def test_a_local_shape_that_no_rank_has_is_refused() -> None:
    rules = Rules((Rule("*", "col", 0, (2, 1), (2, 1)),))
    with pytest.raises(UsageError, match=r"the\.tensor \[7, 4\] is not what rank 1/2 has"):
        rules.share_of_local("the.tensor", (7, 4), 1, 2)


def test_what_is_never_split() -> None:
    rules = Rules.from_json({"rules": [["scale", "col"], ["bias", "row"], ["all", "replicate"]]})
    for name, shape in (
        ("scale", ()),
        ("scale", (1,)),
        ("scale", (1, 8)),
        ("bias", (8,)),
        ("all", (8, 8)),
        ("x", (8,)),
    ):
        assert rules.share(name, shape, 1, 4) == Share(shape)
    rest = Rules.from_json({"rules": [], "default": "replicate"})
    assert rest.share("x", (8, 8), 1, 4) == Share((8, 8))
    assert rest.share_of_local("x", (8, 8), 1, 4) == Share((8, 8))


def test_the_first_rule_decides() -> None:
    rules = Rules.from_json({"rules": [["a.*", "replicate"], ["*", "row"]]})
    assert rules.share("a.w", (4, 4), 0, 2).dim is None
    assert rules.share("b.w", (4, 4), 0, 2).dim == 1


@pytest.mark.parametrize(
    "data",
    [
        None, [], {}, {"rules": {}}, {"rules": [], "else": 1}, {"rules": [], "default": "guess"}, {"rules": [[]]},
        {"rules": [["*"]]}, {"rules": ["*"]}, {"rules": [["*", "diagonal"]]}, {"rules": [["*", "col", -1]]},
        {"rules": [["*", "col", "0"]]}, {"rules": [["*", "col", True]]}, {"rules": [["*", "col", 0, [0]]]},
        {"rules": [["*", "col", 0, ["1"]]]}, {"rules": [["*", "col", 0, [1, 1], [2]]]},
        {"rules": [["*", "col", 0, [1], [-1]]]}, {"rules": [["*", "col", 0, [1], [1], 1]]}, {"rules": [[1, "col"]]},
        {"rules": [["*", "col", 0, 3]]},
    ],
)  # fmt: skip
def test_what_is_no_rule_file(data: Any) -> None:
    with pytest.raises(UsageError):
        Rules.from_json(data)


# --- families --------------------------------------------------------------------------------------------------------

CONFIG = {"num_attention_heads": 8, "num_key_value_heads": 2, "model_type": "llama"}
ATTENTION = {
    "self_attn.q_proj.weight": ((128, 64), 0), "self_attn.k_proj.weight": ((32, 64), 0),
    "self_attn.v_proj.weight": ((32, 64), 0), "self_attn.o_proj.weight": ((64, 128), 1),
}  # fmt: skip
BIASES = {
    "self_attn.q_proj.bias": ((128,), 0), "self_attn.k_proj.bias": ((32,), 0), "self_attn.v_proj.bias": ((32,), 0),
    "self_attn.o_proj.bias": ((64,), None),
}  # fmt: skip
NORMS = {
    "input_layernorm.weight": ((64,), None), "post_attention_layernorm.weight": ((64,), None),
    "self_attn.q_norm.weight": ((16,), None), "self_attn.k_norm.weight": ((16,), None),
}  # fmt: skip


def feed_forward(prefix: str) -> dict[str, tuple[tuple[int, ...], int | None]]:
    return {
        f"{prefix}.gate_proj.weight": ((256, 64), 0),
        f"{prefix}.up_proj.weight": ((256, 64), 0),
        f"{prefix}.down_proj.weight": ((64, 256), 1),
    }


SPLITS: dict[str, dict[str, tuple[tuple[int, ...], int | None]]] = {
    "llama": {
        **ATTENTION, **BIASES, **NORMS, **feed_forward("mlp"),
        "self_attn.rotary_emb.inv_freq": ((8,), None), "mlp.down_proj.bias": ((64,), None), "mlp.up_proj.bias": ((256,), 0),
        "self_attn.qkv_proj.weight": ((192, 64), 0), "mlp.gate_up_proj.weight": ((512, 64), 0),
        "self_attn.q_proj.weight_scale": ((128, 1), 0), "self_attn.o_proj.weight_scale": ((64, 1), None),
        "self_attn.q_proj.input_scale": ((), None), "self_attn.k_proj.k_scale": ((1,), None),
    },
    "qwen": {
        **ATTENTION, **BIASES, **NORMS, **feed_forward("mlp.experts.11"), **feed_forward("mlp.shared_expert"),
        "mlp.gate.weight": ((60, 64), None), "mlp.shared_expert_gate.weight": ((1, 64), None),
    },
    "mistral": {
        **ATTENTION, **NORMS, **feed_forward("mlp"),
        "attention.wq.weight": ((128, 64), 0), "attention.wk.weight": ((32, 64), 0), "attention.wo.weight": ((64, 128), 1),
        "feed_forward.w1.weight": ((256, 64), 0), "feed_forward.w2.weight": ((64, 256), 1),
        "feed_forward.w3.weight": ((256, 64), 0), "attention_norm.weight": ((64,), None),
    },
    "mixtral": {
        **ATTENTION, **NORMS, "block_sparse_moe.gate.weight": ((8, 64), None),
        "block_sparse_moe.experts.7.w1.weight": ((256, 64), 0), "block_sparse_moe.experts.7.w3.weight": ((256, 64), 0),
        "block_sparse_moe.experts.7.w2.weight": ((64, 256), 1),
    },
    "deepseek": {
        "self_attn.q_a_proj.weight": ((24, 64), None), "self_attn.q_a_layernorm.weight": ((24,), None),
        "self_attn.q_b_proj.weight": ((192, 24), 0), "self_attn.kv_a_proj_with_mqa.weight": ((20, 64), None),
        "self_attn.kv_a_proj_with_mqa.weight_scale_inv": ((5, 16), None), "self_attn.kv_a_layernorm.weight": ((16,), None),
        "self_attn.kv_b_proj.weight": ((256, 16), 0), "self_attn.o_proj.weight": ((64, 128), 1),
        "self_attn.q_b_proj.weight_scale_inv": ((12, 24), 0), "self_attn.q_proj.weight": ((192, 64), 0),
        "self_attn.indexer.wq_b.weight": ((64, 24), None), "mlp.gate.e_score_correction_bias": ((256,), None),
        "mlp.gate.weight": ((256, 64), None), "eh_proj.weight": ((64, 128), None), "shared_head.head.weight": ((512, 64), 0),
        "embed_tokens.weight": ((512, 64), 0), **NORMS, **feed_forward("mlp.experts.255"),
        **feed_forward("mlp.shared_experts"), "mlp.experts.255.down_proj.weight_scale_inv": ((8, 16), 1),
    },
}  # fmt: skip


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_tensors_of_a_family(family: str, ranks: int) -> None:
    rules = built_in(family, CONFIG)
    outer = {
        "model.embed_tokens.weight": ((512, 64), 0),
        "lm_head.weight": ((512, 64), 0),
        "model.norm.weight": ((64,), None),
    }
    for name, (shape, dim) in {**outer, **{f"model.layers.3.{k}": v for k, v in SPLITS[family].items()}}.items():
        shares = [rules.share(name, shape, rank, ranks) for rank in range(ranks)]
        assert {share.dim for share in shares} == {dim}, name
        if dim is not None:
            assert merge(span for share in shares for span in share.spans) == [(0, shape[dim])], name


@pytest.mark.parametrize("family", NAMES)
def test_packed_forms_with_axes_of_their_own_are_refused(family: str) -> None:
    rules = built_in(family, CONFIG)
    for name in ("self_attn.o_proj.qweight", "mlp.gate_proj.scales", "visual.patch_embed.weight"):
        with pytest.raises(UsageError, match="no rule says"):
            rules.share(f"model.layers.0.{name}", (64, 64), 0, 2)


def test_query_heads_are_never_replicated() -> None:
    rules = built_in("llama", {**CONFIG, "num_attention_heads": 2})
    with pytest.raises(UsageError, match=r"o_proj.*2 heads cannot be split evenly over 4"):
        rules.share("model.layers.0.self_attn.o_proj.weight", (64, 64), 0, 4)


def test_the_family_of_a_config() -> None:
    kinds = {
        "llama": "llama", "qwen2": "qwen", "qwen3_moe": "qwen", "mistral": "mistral", "mixtral": "mixtral",
        "deepseek_v3": "deepseek", "gemma3": "",
    }  # fmt: skip
    assert {kind: family_of({"model_type": kind}) for kind in kinds} == kinds
    assert family_of({"model_type": "mistral3", "text_config": {"model_type": "mistral"}}) == "mistral"
    inner = {"text_config": {"num_attention_heads": 4}}
    assert built_in("Llama", inner).share("a.k_proj.weight", (64, 8), 1, 2).spans == ((32, 64),)


@pytest.mark.parametrize(
    ("name", "config"), [("gpt", CONFIG), ("llama", {}), ("llama", None), ("llama", {"num_attention_heads": 0})]
)
def test_built_in_rules_that_cannot_be(name: str, config: Any) -> None:
    with pytest.raises(UsageError):
        built_in(name, config)


# --- what travels ----------------------------------------------------------------------------------------------------


@given(cases())
def test_a_share_survives_json(case: tuple[Rule, tuple[int, ...], int]) -> None:
    rule, shape, ranks = case
    share = Rules((rule,)).share("w", shape, ranks - 1, ranks)
    assert Share.from_json(share.to_json()) == share


@pytest.mark.parametrize(
    "row",
    [
        None, [], [[4], 0], [[4], 1, [[0, 2]]], [[4], 0, [[0, 5]]], [[4], 0, [[2, 1]]], [[4], 0, [[2, 4], [0, 2]]],
        [[4], None, [[0, 2]]], [[-4], 0, []], [[4], 0, [[0, 1.5]]], [[True], None, []], [[1 << 60], None, []],
        [[256], 0, [[n, n + 1] for n in range(65)]], [[1] * 65, None, []], [[4], "0", [[0, 4]]], [[4], 0, [[0, 2, 3]]],
    ],
)  # fmt: skip
def test_what_is_no_share(row: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        Share.from_json(row)


def holding(rank: str, shares: dict[str, Share]) -> Holding:
    rows = (("f", "w", "U8", (4, 2), ("0" * 32,)), ("f", "b", "U8", (8,), ("1" * 32,)))
    manifest = Manifest(
        uri="", revision="", selection="", rules=1, directory="", files=(FileRecord("f", 16, "x"),), weights=("f",), tensors=rows
    )  # fmt: skip
    starts = {start_key("f", "w"): 0, start_key("f", "b"): 8}
    return Holding(manifest, (), starts, rank=rank, shares=shares)


def test_a_holding_says_which_part_of_which_tensor_it_has() -> None:
    first, second = Share((8, 2), 0, ((0, 4),)), Share((8, 2), 0, ((4, 8),))
    mine = holding("0/2", {"w": first})
    read = Holding.from_json(mine.to_json(), "there")
    assert (read.rank, read.shares) == ("0/2", {"w": first})
    assert read.digest == mine.digest
    # The same bytes of another part are not the same.
    digests = {holding("1/2", {"w": second}).digest, holding("0/2", {"w": second}).digest, holding("", {}).digest}
    assert len(digests | {mine.digest}) == 4


@pytest.mark.parametrize(
    ("rank", "shares"),
    [
        ("0/2", {"w": [[8, 2], 0, [[0, 3]]]}), ("0/2", {"none": [[8, 2], 0, [[0, 4]]]}), ("", {"w": [[8, 2], 0, [[0, 4]]]}),
        ("0/2", {"w": [[8, 2], 0, [[0, 9]]]}), ("0/2", {"w": "part"}), ("0/2", ["w"]),
    ],
)  # fmt: skip
def test_a_holding_with_wrong_parts_is_refused(rank: str, shares: Any) -> None:
    data = {**holding("", {}).to_json(), "rank": rank, "shares": shares}
    with pytest.raises(IntegrityError, match="there"):
        Holding.from_json(data, "there")
