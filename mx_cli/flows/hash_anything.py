"""`mx hash` with the cache and the origins at hand: snapshots know their digests, URIs are resolved."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mx_cli.base.errors import NotFound, UsageError
from mx_cli.cache.layout import Cache, Model
from mx_cli.cache.snapshots import Snapshots
from mx_cli.flows.context import Context, is_immutable, moving_name
from mx_cli.flows.hash import CHECKPOINT, HashResult, hash_model, is_local
from mx_cli.model import hf_config
from mx_cli.model.digest import TensorDigest
from mx_cli.model.manifest import Manifest
from mx_cli.model.tables import rows_in


def hash_anything(
    model: str,
    context: Context,
    *,
    layout: tuple[str, dict[str, Any]] = CHECKPOINT,
    kind: str | None = None,
    content: bool = True,
    revision: str | None = None,
    verify: bool = False,
) -> HashResult:
    """See `hash_model`. A directory that is a snapshot of the cache has its digests and its origin from its manifest."""
    cache = context.cache()
    manifest = snapshot_manifest(cache, model, context) if is_local(model) else None
    origin = (manifest.uri, manifest.revision) if manifest and "origin" in manifest.identity else None
    result = hash_model(
        model,
        layout=layout,
        kind=kind,
        content=content,
        revision=revision,
        memory=cache.root if is_local(model) else None,
        verify=verify,
        known_rows=known_rows(manifest) if manifest else None,
        known_origin=origin,
        resolve_origin=lambda uri, ref: resolve_revision(uri, ref, context),
        stop=context.stop,
    )
    _doubt(result, context)
    return result


def _doubt(result: HashResult, context: Context) -> None:
    """Warn of a JSON file that is a config neither by its name nor by what it says, such as a tokenizer's."""
    name, only = os.path.basename(result.model), result.identities[0]
    doubtful = only.kind == "config" and name.endswith(".json") and name != "config.json"
    if doubtful and not hf_config.names_a_model(only.config or {}):
        context.warn(f"{result.model} names no model_type and no architectures: it may not be a model's config")


def uses_cache(model: str, content: bool, context: Context) -> bool:
    """Whether the answer may come from the cache: a snapshot, digests of weights read before, or a name resolved here."""
    if not is_local(model):
        return context.settings.offline
    inside = Path(os.path.realpath(os.path.expanduser(model))).is_relative_to(os.path.realpath(context.cache().models))
    return inside or (content and not model.endswith(".json") and os.path.exists(os.path.expanduser(model)))


def snapshot_manifest(cache: Cache, model: str, context: Context) -> Manifest | None:
    """The manifest of a path that is a whole snapshot directory of this cache, reached directly or through links."""
    # realpath: Path.resolve raises for links in a circle, and LocalModel says that better.
    path = Path(os.path.realpath(os.path.expanduser(model)))
    snapshots = path.parent
    if snapshots.name != "snapshots" or str(snapshots.parent.parent) != os.path.realpath(cache.models):
        return None
    for known in cache.all_models():
        if known.path.name == snapshots.parent.name:
            return _largest(Snapshots(known, context.settings.visibility), path.name)
    return None


def _largest(snapshots: Snapshots, directory: str) -> Manifest | None:
    found = [m for m in snapshots.of(directory.partition("+")[0]) if m.directory == directory]
    whole = [manifest for manifest in found if not snapshots.missing(manifest)]
    return max(whole, key=lambda manifest: len(manifest.files), default=None)


def known_rows(manifest: Manifest) -> Mapping[str, Sequence[TensorDigest]]:
    """The manifest's tensor tables by file."""
    tables = {path: rows_in(manifest, path, path) for path in manifest.weights}
    return {path: rows for path, rows in tables.items() if rows is not None}


def resolve_revision(uri: str, revision: str | None, context: Context) -> tuple[str, str]:
    """(canonical URI, immutable revision). Offline when the revision is given and immutable, or known in the cache."""
    origin = context.origin(uri)
    wanted = revision or origin.revision
    try:
        if is_immutable(origin.uri, wanted):
            return origin.uri, wanted
        if context.settings.offline:
            return origin.uri, _cached(context.cache().model(origin.uri), wanted)
        found = origin.listing(wanted or None, context.stop).revision
        if not found:
            raise UsageError(f"{origin.uri} has no immutable revision", hint="prefetch it, then hash the directory")
        return origin.uri, found
    finally:
        origin.close()


def _cached(model: Model, wanted: str) -> str:
    name = moving_name(model.uri, wanted)
    ref = model.read_ref(name)
    if ref is None:
        raise NotFound(f"{model.uri}: offline, and {name!r} was never resolved in this cache", hint="give URI@revision")
    return ref[0]
