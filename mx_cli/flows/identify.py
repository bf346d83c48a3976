"""The identities of what was just verified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mx_cli.base.errors import MxError
from mx_cli.model import hf_config, identity
from mx_cli.model.digest import TensorDigest, merge


def identities(
    uri: str,
    revision: str,
    rows: Mapping[str, Sequence[tuple[str, str, tuple[int, ...], tuple[str, ...]]]],
    prefixes: Mapping[str, str],
    config: bytes | None,
) -> dict[str, str]:
    """Kind -> identity, for each kind that can be known. Content is left out when a weight file has no tensor table."""
    found: dict[str, str] = {}
    if revision:
        found["origin"] = identity.of_origin(uri, revision).id
    tables = [
        (path, prefix, [TensorDigest(*row) for row in rows.get(path, ())]) for path, prefix in sorted(prefixes.items())
    ]
    if tables and all(table for _, _, table in tables):
        try:
            normal = None if config is None else hf_config.load(config, "config.json")
            found["content"] = identity.of_content(merge(tables), normal).id
        except MxError:
            # A config without one meaning, or a tensor that stands in two files: such content has no identity.
            pass
    return found
