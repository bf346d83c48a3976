"""Which weights an engine is to have: those that its operator named, or those that it was started with."""

from __future__ import annotations

import os
from dataclasses import dataclass

from mx_cli.engines.options import Options
from mx_cli.flows.context import Context
from mx_cli.flows.hash_anything import resolve_revision, snapshot_manifest


@dataclass(frozen=True)
class Weights:
    """A canonical URI and its immutable revision. `own`: they are those that the engine was started with."""

    uri: str
    revision: str
    own: bool


def weights_of(options: Options, model: str, revision: str | None, context: Context) -> Weights:
    """`model` and `revision` as the engine got them: a directory, or a name on the hub.

    For a snapshot of the cache its manifest tells. Asks the origin where the revision is a moving name.
    Raises what asking raises, UsageError for what has no immutable revision.
    """
    if not options.uri:
        return Weights(*_own(model, options.revision or revision, context), own=True)
    uri, found = resolve_revision(options.uri, options.revision, context)
    return Weights(uri, found, own=(uri, found) == _own_unasked(model, revision, context))


def _own(model: str, revision: str | None, context: Context) -> tuple[str, str]:
    if not os.path.exists(model):
        return resolve_revision(f"hf://{model}", revision, context)
    manifest = snapshot_manifest(context.cache(), model, context)
    if manifest is not None and manifest.revision:
        return manifest.uri, manifest.revision
    return resolve_revision(model, revision, context)


def _own_unasked(model: str, revision: str | None, context: Context) -> tuple[str, str | None]:
    """The same, as far as it is known here: nothing is asked for."""
    if not os.path.exists(model):
        return f"hf://{model}", revision
    manifest = snapshot_manifest(context.cache(), model, context)
    return (manifest.uri, manifest.revision) if manifest is not None else ("", None)
