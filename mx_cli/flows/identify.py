"""The identities of what was just verified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mx_cli.base.errors import MxError
from mx_cli.flows.request import Wanted
from mx_cli.model import hf_config, identity
from mx_cli.model.digest import TensorDigest, merge
from mx_cli.model.identity import Identity
from mx_cli.model.shard_index import check_homes


def identities(
    uri: str, revision: str, rows: Mapping[str, Sequence[TensorDigest]], wanted: Wanted, config: bytes | None
) -> tuple[dict[str, str], str]:
    """(kind -> identity of the weights for each kind that can be known, why there is no content identity).

    `rows` has the tensor table of each weight file that has one, by path.
    """
    found, lacking = identity_records(uri, revision, rows, wanted, config)
    return {one.kind: one.id for one in found if one.kind != "config"}, lacking


def identity_records(
    uri: str, revision: str, rows: Mapping[str, Sequence[TensorDigest]], wanted: Wanted, config: bytes | None
) -> tuple[list[Identity], str]:
    """Like `identities`, as full records, and with that of the configuration."""
    found: list[Identity] = []
    if revision:
        found.append(identity.of_origin(uri, revision))
    try:
        normal = None if config is None else hf_config.load(config, "config.json")
        if normal is not None:
            found.append(identity.of_config(normal))
        if not wanted.prefixes or not wanted.prefixes.keys() <= rows.keys():
            return found, "no tensor table of all weights"
        for index in wanted.indexes:
            check_homes(index, [(shard, [row.name for row in rows.get(shard, ())]) for shard in index.shards])
        table = merge((path, prefix, rows[path]) for path, prefix in sorted(wanted.prefixes.items()))
        return [identity.of_content(table, normal), *found], ""
    except MxError as error:
        return found, error.what
