"""The identities of what was just verified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mx_cli.base.errors import MxError
from mx_cli.flows.request import Wanted
from mx_cli.model import hf_config, identity
from mx_cli.model.digest import TensorDigest, merge
from mx_cli.model.shard_index import check_homes


def identities(
    uri: str, revision: str, rows: Mapping[str, Sequence[TensorDigest]], wanted: Wanted, config: bytes | None
) -> tuple[dict[str, str], str]:
    """(kind -> identity for each kind that can be known, why there is no content identity; empty when there is one).

    `rows` has the tensor table of each weight file that has one, by path.
    """
    found: dict[str, str] = {}
    if revision:
        found["origin"] = identity.of_origin(uri, revision).id
    if not wanted.prefixes or not wanted.prefixes.keys() <= rows.keys():
        return found, "no tensor table of all weights"
    try:
        for index in wanted.indexes:
            check_homes(index, [(shard, [row.name for row in rows.get(shard, ())]) for shard in index.shards])
        normal = None if config is None else hf_config.load(config, "config.json")
        table = merge((path, prefix, rows[path]) for path, prefix in sorted(wanted.prefixes.items()))
        found["content"] = identity.of_content(table, normal).id
    except MxError as error:
        return found, error.what
    return found, ""
