"""Peers that each hold a part of the weights, found and read as one set."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from mx_cli.base.errors import Incompatible, MxError
from mx_cli.engine.together import side_by_side
from mx_cli.flows.group import Group, Peer, announced_holding, by_manifest
from mx_cli.flows.peering import Peering
from mx_cli.flows.pull_memory import Shape, place_of, table
from mx_cli.flows.ranks import tied
from mx_cli.model.holding import Holding
from mx_cli.model.share import Share

T = TypeVar("T")


class SharePeering(Peering):
    """A search that ends with several groups: all that match, whatever part of the weights each of them has."""

    def find_set(self, wait: float, check: Callable[[Sequence[Group]], T]) -> T:
        """What `check` makes of the groups; while it raises Incompatible, look again for `wait` seconds.

        Blocks. Raises the last Incompatible, or what `find` raises when nobody matches.
        """

        def choose(peers: Sequence[Peer]) -> T | None:
            self.groups = tuple(self._groups(peers))
            return check(self.groups) if self.groups else None

        return self._look_for(wait, choose, again=(Incompatible,))

    def _groups(self, peers: Sequence[Peer]) -> list[Group]:
        """One for each manifest, in an order that is the same for all readers: they queue for one after the other."""
        rows = [peers for _, peers in sorted(by_manifest(peers).items())]
        found = side_by_side(self._first_that_answers, rows, len(rows), self._context.stop)
        return [group for group in found if group]

    def _first_that_answers(self, peers: list[Peer]) -> Group | None:
        for peer in peers:
            try:
                return Group(announced_holding(peer), peers)
            except MxError as error:
                self.refusals.reasons[peer.address] = error.what
        return None


@dataclass(frozen=True)
class Offered:
    """What a set of groups has between them: the whole tensors, and which part of each a group has."""

    groups: tuple[Group, ...]
    shapes: dict[str, Shape]
    parts: dict[str, dict[int, Share]]

    def config(self) -> Mapping[str, Any] | None:
        """The model's config.json, if any of the peers knows it."""
        known = (one.config for group in self.groups for one in group.holding.identities)
        return next((config for config in known if config), None)


def offered(groups: Sequence[Group]) -> Offered:
    """Raises Incompatible when two groups do not mean the same tensor by a name, or have other bytes of the same part."""
    shapes: dict[str, Shape] = {}
    parts: dict[str, dict[int, Share]] = {}
    for index, group in enumerate(groups):
        for name, (dtype, shape) in table(group.holding).items():
            share = group.holding.shares.get(name) or Share(shape)
            whole = shapes.setdefault(name, (dtype, share.shape))
            if whole != (dtype, share.shape):
                raise Incompatible(
                    f"{name}: {dtype}{list(share.shape)} at {_who(group)}, {whole[0]}{list(whole[1])} elsewhere",
                    hint="peers of other weights have the same identity",
                )
            for other, known in parts.setdefault(name, {}).items():
                if known == share and _differ(groups[other].holding, group.holding, name):
                    raise Incompatible(f"{name}: other bytes at {_who(group)} than at {_who(groups[other])}")
            parts[name][index] = share
    return Offered(tuple(groups), shapes, parts)


def _differ(one: Holding, other: Holding, name: str) -> bool:
    left, right = one.by_name.get(name), other.by_name.get(name)
    return bool(left and right and left.blocks and right.blocks and left.blocks != right.blocks)


def _who(group: Group) -> str:
    rank = f" (rank {group.holding.rank})" if group.holding.rank else ""
    return group.peers[0].address + rank


def twins_among(found: Offered, shares: Mapping[str, Share]) -> dict[str, str]:
    """Names whose bytes are those of an earlier one at all who have them: tied weights stay tied."""

    def places(name: str) -> object:
        return tuple((index, place_of(found.groups[index].holding, name)) for index in sorted(found.parts[name]))

    return tied(found.shapes, shares, places)
