"""The identities of what was just verified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mx_cli.base.errors import MxError
from mx_cli.flows.request import Wanted
from mx_cli.model import hf_config, identity
from mx_cli.model.digest import TensorDigest
from mx_cli.model.identity import Identity
from mx_cli.model.tables import whole_table


def identities(
    uri: str, revision: str, rows: Mapping[str, Sequence[TensorDigest]], wanted: Wanted, config: bytes | None
) -> tuple[dict[str, str], str]:
    """(kind -> identity of the weights for each kind that can be known, why there is no content identity).

    `rows` has the tensor table of each weight file that has one, by path.
    """
    found, lacking = records(uri, revision, rows, wanted, config)
    return {one.kind: one.id for one in found if one.kind != "config"}, lacking


def records(
    uri: str, revision: str, rows: Mapping[str, Sequence[TensorDigest]], wanted: Wanted, config: bytes | None
) -> tuple[list[Identity], str]:
    """Like `identities`, as full records, and with that of the configuration."""
    table, wrong = None, ""
    try:
        table = content_table(rows, wanted)
    except MxError as error:
        wrong = error.what
    found, lacking = records_of(uri, revision, table, config)
    return found, wrong or lacking


def content_table(rows: Mapping[str, Sequence[TensorDigest]], wanted: Wanted) -> tuple[TensorDigest, ...] | None:
    """The table of a whole checkpoint, None where a weight file has none. Raises as `whole_table` does."""
    if not wanted.prefixes or not wanted.prefixes.keys() <= rows.keys():
        return None
    return whole_table(rows, wanted.prefixes, wanted.indexes)


def records_of(
    uri: str, revision: str, table: Sequence[TensorDigest] | None, config: bytes | None
) -> tuple[list[Identity], str]:
    """Like `records`, of what `content_table` gives."""
    found = [identity.of_origin(uri, revision)] if revision else []
    try:
        normal = None if config is None else hf_config.load(config, "config.json")
    except MxError as error:
        return found, error.what
    if normal is not None:
        found.append(identity.of_config(normal))
    if table is None:
        return found, "no tensor table of all weights"
    return [identity.of_content(table, normal), *found], ""
