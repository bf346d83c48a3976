"""Which files of a listing make one usable model.

The rules, in their version RULES_VERSION. A folder's *weight set* is the first of these that it has:

1. the shards of its index (`model.safetensors.index.json` before others)
2. `*.safetensors`, without `consolidated*` and without variants (`model.fp16.safetensors` beside `model.safetensors`)
3. the shards of a variant's index (`model.safetensors.index.fp16.json`)
4. the shards of a `consolidated` index, else `consolidated*.safetensors`
5. the same for `*.bin`; then `*.pt`, `*.pth`, `*.ckpt`; then every `*.gguf`; then what other frameworks use (`.onnx`,
   `.h5`, `.msgpack` and so on)

The model is the top folder's weight set and all small other files, wherever they lie. Weights in sub-folders
(`original/`, `metal/`, `onnx/`) are left out, except that

- a pipeline (`model_index.json` at the top) takes the weight set of each of its folders, and none at the top
- sentence-transformers (`modules.json` at the top) takes those of its numbered folders (`2_Dense/`) too
- a checkpoint without weights at the top takes each folder's weight set

State of a training run (`optimizer.pt` and such) is left out, and so are other files above 256 MiB. A listing without
any weight file is taken whole. `--exclude` takes files away before the rules, `--include` replaces the rules, `--all`
switches them off. Several quantisations in GGUF are one weight set: `--include '*Q4_K_M*'` chooses.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from mx_cli.base.errors import NotFound
from mx_cli.model.paths import check_paths, collisions
from mx_cli.model.shard_index import Index, check_complete, check_numbered, is_index, read_index

__all__ = [
    "RULES_VERSION", "Index", "Selection", "check_paths", "collisions", "index_files", "read_index", "select",
]  # fmt: skip

RULES_VERSION = 1
LARGE = 256 << 20

_TORCH = (".pt", ".pth", ".ckpt")
_OTHERS = (
    ".onnx", ".onnx_data", ".onnx.data", ".h5", ".keras", ".msgpack", ".tflite", ".ot", ".pb", ".mlmodel", ".pdparams",
    ".pdiparams", ".nemo", ".engine", ".plan", ".mar", ".caffemodel", ".ggml",
    ".dduf", ".litertlm", ".task",
)  # fmt: skip
_WEIGHTS = (".safetensors", ".bin", *_TORCH, ".gguf", *_OTHERS)
_RUN_STATE = re.compile(
    r"(^|/)(optimizer|scheduler|random_states|rng_state|scaler|training_args|trainer_state|global_step)[^/]*\.(bin|pt|pth|pkl)$"
)
_MODULE = re.compile(r"^\d+_[^/]+$")


@dataclass(frozen=True)
class Selection:
    """What to fetch. Paths are sorted; `left_out` holds (path, size, reason).

    `weights` are the weight files among `files`, each with the prefix that keeps the parts of a pipeline apart
    (`unet/`, else empty). `indexes` are the shard indexes that decided.
    """

    files: tuple[str, ...]
    left_out: tuple[tuple[str, int, str], ...]
    bytes_total: int
    bytes_saved: int
    weights: tuple[tuple[str, str], ...]
    indexes: tuple[Index, ...]


def is_weight(path: str) -> bool:
    """Whether a file's name says that it holds weights."""
    return path.lower().endswith(_WEIGHTS) and not _RUN_STATE.search(path)


def index_files(paths: Iterable[str], *, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> list[str]:
    """The shard indexes whose content `select` needs, sorted: small files to read before anything is chosen."""
    kept = sorted(path for path in paths if not matches(path, exclude) and (not include or matches(path, include)))
    wanted = set(_weight_folders(kept))
    return [path for path in kept if is_index(path) and _folder(path) in wanted]


def select(
    listing: Sequence[tuple[str, int]],
    indexes: Mapping[str, Index] | None = None,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    everything: bool = False,
) -> Selection:
    """Choose from (path, size). `indexes`: those of index_files, read by read_index.

    Raises IntegrityError for names that can't be files and for shards that are missing, by the index that decides or by
    the names of the others; NotFound when nothing is left. Patterns are shell patterns on the whole relative path where
    `*` also matches `/`; one without a `/` also matches a file's own name, one that ends with `/` everything below.
    """
    sizes = dict(listing)
    check_paths(path for path, _ in listing)
    reasons: dict[str, str] = {}
    kept = sorted(sizes)
    if exclude:
        reasons |= {path: "excluded" for path in kept if matches(path, exclude)}
        kept = [path for path in kept if path not in reasons]
    if include:
        reasons |= {path: "not included" for path in kept if not matches(path, include)}
    elif not everything:
        reasons |= _by_the_rules(kept, sizes, indexes or {}, frozenset(reasons))
    files = tuple(path for path in kept if path not in reasons)
    if not files:
        said = "matches the patterns" if include or exclude else "is there"
        raise NotFound(f"no file {said} ({len(sizes)} listed)", hint="check the name, or --include and --exclude")
    decided = _chosen_sets(files, indexes or {}, reasons.keys())
    used = tuple(found.index for found in decided if found.index)
    for index in used:
        check_complete(index, sizes)
    if not include:
        check_numbered([path for found in decided if not found.index for path in found.files], sizes)
    left_out = tuple((path, sizes[path], reasons[path]) for path in sorted(reasons))
    weights = sorted((path, found.prefix) for found in decided for path in found.files)
    saved = sum(size for _, size, _ in left_out)
    return Selection(files, left_out, sum(sizes[path] for path in files), saved, tuple(weights), used)


def matches(path: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns of --include or --exclude fits a relative path."""
    name = _base(path)
    for pattern in patterns:
        whole = pattern.removeprefix("/") + ("*" if pattern.endswith("/") else "")
        if fnmatchcase(path, whole) or ("/" not in pattern and fnmatchcase(name, pattern)):
            return True
    return False


@dataclass(frozen=True)
class _Set:
    """A folder's weight set."""

    folder: str
    prefix: str
    files: tuple[str, ...]
    index: Index | None


def _by_the_rules(
    paths: list[str], sizes: Mapping[str, int], indexes: Mapping[str, Index], gone: Set[str]
) -> dict[str, str]:
    """The reason for each path that the rules leave out. `gone`: what --exclude took away."""
    chosen = _chosen_sets(paths, indexes, gone)
    if not chosen:
        return {}
    taken = {path for found in chosen for path in found.files}
    folders = {found.folder: found for found in chosen}
    reasons = {}
    for path in paths:
        if path in taken:
            continue
        if _RUN_STATE.search(path):
            reasons[path] = "state of a training run"
        elif is_weight(path):
            reasons[path] = _why_not(path, folders.get(_folder(path)))
        elif sizes[path] > LARGE:
            reasons[path] = "large, and not known as weights"
    return reasons


def _why_not(path: str, found: _Set | None) -> str:
    if found is None:
        return "weights of another folder"
    return f"not in {found.index.name}" if found.index else "another format or variant of the same weights"


def _chosen_sets(paths: Sequence[str], indexes: Mapping[str, Index], gone: Set[str]) -> list[_Set]:
    by_folder: dict[str, list[str]] = {}
    for path in paths:
        by_folder.setdefault(_folder(path), []).append(path)
    listed = set(paths)
    taken: set[str] = set()
    found = []
    for folder in _weight_folders(paths):
        here = [path for path in by_folder.get(folder, []) if path not in taken]
        for index, files in _candidates(here, indexes, listed, gone):
            if index or files:
                taken.update(files)
                found.append(_Set(folder, f"{folder}/" if folder else "", tuple(files), index))
                break
    if len(found) == 1 and not _is_pipeline(listed):
        return [replace(found[0], prefix="")]
    return found


def _weight_folders(paths: Sequence[str]) -> list[str]:
    """The folders whose weight sets count, "" being the top."""
    folders = sorted({_folder(path) for path in paths if is_weight(path) or is_index(path)})
    if "model_index.json" in paths:
        return [folder for folder in folders if folder and "/" not in folder] or folders
    if "modules.json" in paths:
        return [folder for folder in folders if not folder or _MODULE.match(folder)] or folders
    return [""] if "" in folders else folders


def _is_pipeline(paths: Iterable[str]) -> bool:
    return any(path in ("model_index.json", "modules.json") for path in paths)


def _candidates(
    here: list[str], indexes: Mapping[str, Index], listed: Set[str], gone: Set[str]
) -> Iterator[tuple[Index | None, list[str]]]:
    """What could be a folder's weight set, the best first; empty ones among them."""
    known = [indexes[path] for path in here if path in indexes]
    usable = [index for index in known if not gone >= set(index.shards)]

    def of(*suffixes: str) -> list[str]:
        return [path for path in here if path.lower().endswith(suffixes) and is_weight(path)]

    def indexed(pattern: re.Pattern[str]) -> tuple[Index | None, list[str]]:
        found = [index for index in usable if pattern.fullmatch(_base(index.name))]
        first = min(found, key=lambda index: (len(_base(index.name)), index.name), default=None)
        return first, [shard for shard in first.shards if shard in listed] if first else []

    for suffix in (".safetensors", ".bin"):
        variants = re.compile(rf"(?!consolidated).*{re.escape(suffix)}\.index\.[\w-]+\.json")
        of_variants = {shard for index in usable if variants.fullmatch(_base(index.name)) for shard in index.shards}
        yield indexed(re.compile(rf"(model|pytorch_model){re.escape(suffix)}\.index\.json"))
        yield indexed(re.compile(rf"(?!consolidated).*{re.escape(suffix)}\.index\.json"))
        plain = [path for path in of(suffix) if not _base(path).startswith("consolidated") and path not in of_variants]
        yield None, _without_variants(plain)
        yield indexed(variants)
        yield indexed(re.compile(rf"consolidated.*{re.escape(suffix)}\.index\.json"))
        yield None, of(suffix)
    yield indexed(re.compile(r".*\.(pt|pth)\.index\.json"))
    for suffix in (*_TORCH, ".gguf"):
        yield None, of(suffix)
    yield None, of(*_OTHERS)


def _without_variants(paths: list[str]) -> list[str]:
    """`model.fp16.safetensors` is a variant when `model.safetensors` is there too."""
    names = set(paths)

    def plain_name(path: str) -> str:
        folder, slash, base = path.rpartition("/")
        stem, _, suffix = base.rpartition(".")
        return f"{folder}{slash}{stem.partition('.')[0]}.{suffix}"

    return [path for path in paths if plain_name(path) == path or plain_name(path) not in names]


def _base(path: str) -> str:
    return path.rpartition("/")[2]


def _folder(path: str) -> str:
    return path.rpartition("/")[0]
