"""Bytes that are not the origin's: fetched once more, alone, and never kept for the next run."""

from __future__ import annotations

import zlib
from pathlib import Path

import xxhash

from tests.rig import cachecheck, servers
from tests.support import MIB, Mx, checkpoint_files, tree


def half(mx: Mx, hub: servers.Hub) -> None:
    """A download that was killed on its way."""
    hub.flags("slow=3000000")
    running = mx.start("prefetch", hub.uri, env=hub.env | {"MX_PROGRESS_EVERY": "0.1s"})
    running.wait_err("transfer +[4-8][0-9] %", 40)
    running.kill()
    hub.flags("ok")


def forge(part: Path) -> None:
    """Wrong bytes in a part, and a journal that swears to them."""
    wrong = b"wrong" * 1000
    with part.open("r+b") as file:
        file.write(wrong)
    body = f"{part.name.partition('.')[0]} 0 {len(wrong)} {xxhash.xxh3_128(wrong).hexdigest()}".encode()
    with (part.parent / "journal.1").open("wb") as journal:
        journal.write(body + f" {zlib.crc32(body):08x}\n".encode())


def test_a_part_that_lies(mx: Mx, hub: servers.Hub) -> None:
    """Its blocks are what its journal claims, but not what the origin holds."""
    files = checkpoint_files(shards=2, size=16 * MIB)
    hub.commit(files)
    half(mx, hub)
    forge(max(mx.cache.glob("models/*/staging/*/*.part.1"), key=lambda path: path.stat().st_size))
    result = mx("prefetch", hub.uri, env=hub.env).ok()
    assert "wrong sha256" in result.err
    assert tree(Path(result.out.strip())) == cachecheck.sums(files)
    cachecheck.check_clean(mx.cache)


def test_only_the_wrong_file_is_fetched_again(mx: Mx, hub: servers.Hub) -> None:
    """What the first try brought of the others counts for the second."""
    files = checkpoint_files(shards=2, size=16 * MIB)
    hub.commit(files)
    half(mx, hub)
    hub.reset()
    parts = sorted(mx.cache.glob("models/*/staging/*/*.part.1"))
    assert len(parts) == 2
    forge(parts[0])
    result = mx("prefetch", hub.uri, env=hub.env).ok()
    assert tree(Path(result.out.strip())) == cachecheck.sums(files)
    sizes = sorted(len(data) for name, data in files.items() if name.startswith("model-0"))
    served = sorted(hub.bytes_served(name) for name in files if name.startswith("model-0"))
    assert served[0] <= sizes[0]
    assert served[1] <= 2 * sizes[1] + MIB


def test_wrong_twice_is_the_end(mx: Mx, hub: servers.Hub) -> None:
    """The origin's digest and its bytes do not agree: said each time, and nothing wrong stays."""
    files = checkpoint_files(shards=1, size=6 * MIB)
    hub.commit(files)
    hub.flags("rot=0")
    for _ in range(2):
        hub.reset()
        hub.flags("rot=0")
        result = mx("prefetch", hub.uri, "--include", "model.safetensors", env=hub.env).exits(16)
        assert "wrong sha256" in result.err
        assert hub.bytes_served("model.safetensors") == 2 * len(files["model.safetensors"])
        assert not cachecheck.parts(mx.cache)
        assert not list(mx.cache.glob("models/*/snapshots/*/model.safetensors"))
    hub.flags("ok")
    assert tree(Path(mx("prefetch", hub.uri, env=hub.env).ok().out.strip())) == cachecheck.sums(files)
