"""Holdings under other names: the parts of a pipeline (`unet/`, `vae/`) share names in their files, and must not in memory.

A tensor `w` of the folder `unet` is `unet/w`. In a mapping of modules, `{"unet": module}`, it is `unet.w`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mx_cli.model.holding import Holding, start_key
from mx_cli.model.selection import read_index, select


def named_by_part(holding: Holding) -> Holding:
    """The holding with each part's folder before the names of its tensors; the very same one where there are no parts.

    Files hold their tensors' bare names, and so do manifests. Raises IntegrityError for shard indexes that cannot be.
    """
    indexes = {path: read_index(path, text.encode()) for path, text in holding.texts.items()}
    files = [(record.path, record.size) for record in holding.manifest.files]
    return with_prefixes(holding, dict(select(files, indexes).weights) if files else {})


def with_prefixes(holding: Holding, prefixes: Mapping[str, str]) -> Holding:
    """The holding with the prefix of each file before the names of its tensors; the very same one where there is none."""
    if not any(prefixes.values()):
        return holding
    return renamed(holding, lambda file, name: prefixes.get(file, "") + name)


def named_as_in(holding: Holding, names: Iterable[str]) -> Holding:
    """The holding of `named_by_part` with `unet.w`, as mappings of modules have it, unless `names` have it as `unet/w`."""
    parts = _parts(holding)
    folders = tuple(f"{folder}/" for folder in set(parts.values()))
    if not folders or any(name.startswith(folders) for name in names):
        return holding

    def dotted(file: str, name: str) -> str:
        folder = parts.get(file)
        return f"{folder.replace('/', '.')}.{name[len(folder) + 1 :]}" if folder else name

    return renamed(holding, dotted)


def renamed(holding: Holding, rename: Callable[[str, str], str]) -> Holding:
    """The holding with `rename(file, name)` for the names of its tensors. Its bytes stay where they are."""
    rows: list[tuple[Any, ...]] = []
    starts = {}
    for file, name, *rest in holding.manifest.tensors:
        now = rename(file, name)
        rows.append((file, now, *rest))
        start = holding.starts.get(start_key(file, name))
        if start is not None:
            starts[start_key(file, now)] = start
    file_of = {name: tensor.file for name, tensor in holding.by_name.items()}
    file_of |= {name: file_of[alias.of] for name, alias in holding.aliases.items()}
    now_of = {name: rename(file, name) for name, file in file_of.items()}
    return dataclasses.replace(
        holding,
        manifest=dataclasses.replace(holding.manifest, tensors=tuple(rows)),
        starts=starts,
        aliases={now_of[name]: alias._replace(of=now_of[alias.of]) for name, alias in holding.aliases.items()},
        kinds={now_of[name]: kind for name, kind in holding.kinds.items() if name in now_of},
    )


def _parts(holding: Holding) -> Mapping[str, str]:
    """The folder of each file whose tensors are named by it."""
    found = {}
    for file, name, *_ in holding.manifest.tensors:
        folder = file.rpartition("/")[0]
        if folder and name.startswith(f"{folder}/"):
            found[file] = folder
    return found
