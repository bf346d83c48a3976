"""Which rank of how many, and by which rules: what `rank=` and `rules=` mean everywhere."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mx_cli.base.errors import UsageError
from mx_cli.model import hf_config, json_strict
from mx_cli.model.share import Share
from mx_cli.plan.families import NAMES, built_in, family_of
from mx_cli.plan.shards import Rules

Config = Callable[[], Mapping[str, Any] | None]
"""The model's config.json, None where there is none."""
_RANK = re.compile(r"([0-9]{1,6})/([0-9]{1,6})")


@dataclass(frozen=True)
class Cut:
    """The part of rank `rank` of `ranks`."""

    rank: int
    ranks: int
    rules: Rules

    @property
    def text(self) -> str:
        return f"{self.rank}/{self.ranks}"

    def shares(self, shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, Share]:
        """The rank's part of each whole tensor, name -> (dtype, shape). Raises UsageError naming the tensor and the rule that does not fit."""
        return {name: self.rules.share(name, shape, self.rank, self.ranks) for name, (_, shape) in shapes.items()}


def parse_rank(text: str) -> tuple[int, int]:
    """(rank, ranks) of `r/n`, ranks counted from 0. Raises UsageError."""
    found = _RANK.fullmatch(text) if isinstance(text, str) else None
    rank, ranks = (int(found[1]), int(found[2])) if found else (0, 0)
    if not rank < ranks:
        raise UsageError(f"not a rank: {text!r}", hint="r/n, counted from 0: the second of four is 1/4")
    return rank, ranks


def cut_of(rank: str, rules: Any, config: Config) -> Cut:
    """The cut of `rank` (r/n) by `rules`: a family's name, a rule file or its content, or None for the config's family.

    Raises UsageError for what is no rules, and where the config lacks what the rules of a family need.
    """
    number, ranks = parse_rank(rank)
    if isinstance(rules, Rules):
        return Cut(number, ranks, rules)
    if isinstance(rules, Mapping):
        return Cut(number, ranks, Rules.from_json(dict(rules)))
    if ranks == 1:
        # The whole is the same by all rules.
        return Cut(number, ranks, Rules((), replicate_rest=True))
    if rules is not None and str(rules).lower() not in NAMES:
        return Cut(number, ranks, _rule_file(rules))
    found = config()
    if found is None:
        raise UsageError("there is no config.json that says how many heads there are", hint="a rule file: --rules FILE")
    family = str(rules) if rules is not None else family_of(found)
    if not family:
        raise UsageError(
            f"no built-in rules for {found.get('model_type')!r}",
            hint=f"there are {', '.join(NAMES)}; or a rule file: --rules FILE",
        )
    return Cut(number, ranks, built_in(family, found))


def _rule_file(rules: Any) -> Rules:
    if not isinstance(rules, (str, os.PathLike)):
        raise UsageError(f"not rules: {rules!r}", hint=f"{', '.join(NAMES)}, a file, or what one holds")
    path = Path(rules)
    try:
        return Rules.from_json(json_strict.parse(path.read_bytes(), str(path)))
    except OSError as error:
        hint = f"families: {', '.join(NAMES)}; else a JSON file of rules"
        raise UsageError(f"not a rule file: {path} ({error.strerror})", hint=hint) from None


def config_of(data: bytes | None) -> Mapping[str, Any] | None:
    """The normalised config.json of these bytes, None for none. Raises what `hf_config.load` raises."""
    return None if data is None else hf_config.load(data, "config.json")
