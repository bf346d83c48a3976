"""How large a model is, and whether what it would come from answers: for a doctor, which must not wait for it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

from mx_cli.base import units
from mx_cli.base.cancel import Stop
from mx_cli.base.capability import FAIL, OK, Capability
from mx_cli.base.config import resolve
from mx_cli.base.errors import MxError
from mx_cli.flows.context import Context
from mx_cli.flows.hash import is_local
from mx_cli.flows.local_files import LocalFiles
from mx_cli.flows.local_model import LocalModel
from mx_cli.flows.prefetch import preview
from mx_cli.flows.request import Request
from mx_cli.model.header import SNIFF_BYTES, check_payload
from mx_cli.model.identity import kind_of

ROWS = ("model", "origin")


def probe(arguments: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """ROWS in order. `model`: a URI, a directory or an identity; `settings`: those that were chosen, as text.

    Asks the origin of a URI, and nobody else. Blocks as the origin and the file system do.
    """
    # Whether it answers now is the question.
    context = Context(resolve(arguments["settings"]), Stop(), lambda event: None).with_settings(retry_for=0.0)
    model = arguments["model"]
    try:
        rows = _of_identity(model, context) if kind_of(model) else _of_place(model, context)
    except MxError as error:
        said = error.what if model in error.what else f"{model}: {error.what}"
        rows = (Capability("model", FAIL, said, error.hint or "mx doctor without it"),)
    for row in rows:
        yield row.to_json()


def _of_place(model: str, context: Context) -> tuple[Capability, ...]:
    if is_local(model):
        _check_local(model)
    if is_local(model) and not os.path.isdir(os.path.expanduser(model)):
        size = os.path.getsize(os.path.expanduser(model)) if os.path.exists(os.path.expanduser(model)) else 0
        if size:
            return (_sized(model, size, 1, "on this machine"),)
    started = time.monotonic()
    found = preview(Request(model), context)
    seconds = time.monotonic() - started
    size = sum(count or 0 for _, count, _ in found.files)
    if is_local(model):
        return (_sized(model, size, len(found.files), "on this machine"),)
    there = f"{units.size(found.missing)} not in the cache" if found.missing else "all of it in the cache"
    row = _sized(found.uri, size, len(found.files), there, missing=found.missing)
    said = "not asked: --offline" if context.settings.offline else f"answers in {1000 * seconds:.0f} ms"
    return row, Capability("origin", OK, f"{found.uri} {said}", facts={"seconds": round(seconds, 3)})


def _check_local(model: str) -> None:
    """Raises MxError for what is no model, and for weights whose first bytes show that they are none. A small read of each."""
    local = LocalModel(model)
    for name, _ in local.selection.weights if local.selection else ():
        with LocalFiles(local.folder).opened(name) as (fd, info):
            check_payload(name, os.pread(fd, SNIFF_BYTES, 0), info.st_size)


def _of_identity(model: str, context: Context) -> tuple[Capability, ...]:
    """From the manifests of the cache, and from what peers' records say. Asks no peer."""
    for known in context.cache().all_models():
        for manifest in context.snapshots(known).everything():
            if model in manifest.identity.values():
                size = sum(record.size for record in manifest.files)
                return (_sized(model, size, len(manifest.files), "in the cache", missing=0),)
    records = [record for record in context.directory().records(context.stop) if model in record.identities]
    if records:
        where = f"at {units.count(len(records), 'peer')}"
        return (_sized(model, records[0].size, 0, where, missing=records[0].size),)
    return (
        Capability("model", FAIL, f"{model}: neither in the cache nor at a peer", "mx peers; mx pull --origin URI"),
    )


def _sized(model: str, size: int, files: int, where: str, *, missing: int = 0) -> Capability:
    count = f" in {units.count(files, 'file')}" if files else ""
    facts = {"bytes": size, "files": files, "missing": missing}
    return Capability("model", OK, f"{model}: {units.size(size)}{count}, {where}", facts=facts)
