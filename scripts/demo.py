"""scripts/demo, once the environment is there: three downloaders and two peers, a kill -9 for each, and what is left."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from tests.rig import checkpoints, servers, serving
from tests.support import clean_env

SIZE = 64 << 20
BANDWIDTH = "16MiB"
KILL_AFTER = 40  # per cent
EACH_GIVES = 8 << 20  # bytes that a peer has given when one of them is killed
DEADLINE = 60.0  # seconds


class Broken(Exception):
    """Something did not go as promised."""


class Demo:
    """The commands of the demo, run and shown."""

    def __init__(self, place: Path, s3: servers.S3) -> None:
        self.s3 = s3
        self._names = {str(place / "cache"): "$MX_CACHE_DIR", str(place): "$DEMO", s3.endpoint: "http://store"}
        for name in ("home", "run"):
            (place / name).mkdir(mode=0o700)
        extra = {"MX_MAX_BANDWIDTH": BANDWIDTH, "MX_PROGRESS_EVERY": "1s", "MX_STALL_TIMEOUT": "60s", "MX_TTL": "20s"}
        extra |= {"MX_NODE_NAME": "demo", "XDG_RUNTIME_DIR": str(place / "run")}
        self.env = clean_env(place / "home", place / "cache", {**s3.env, **extra})

    def mx(self, *arguments: str, expect: int = 0) -> str:
        """Run `mx ARGUMENTS…`, show both streams; its stdout."""
        print(f"\n$ mx {' '.join(self.short(word) for word in arguments)}", flush=True)
        done = subprocess.run(self.command(*arguments), env=self.env, capture_output=True, text=True, timeout=DEADLINE)
        # The columns of a table are as wide as what `short` takes away.
        print(re.sub(r" {3,}", "  ", self.short(done.stderr + done.stdout)), end="", flush=True)
        if done.returncode != expect:
            raise Broken(f"mx {arguments[0]} exited {done.returncode}, not {expect}")
        return done.stdout.strip()

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "mx_cli", *arguments]

    def name(self, long: str, name: str) -> None:
        """Show `name` for `long` from now on."""
        self._names[long] = name

    def short(self, text: str) -> str:
        """The text without what is long and different each time."""
        for long, name in self._names.items():
            text = text.replace(long, name)
        return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{52}\b", r"\1…", text)


class Downloader:
    """One `mx prefetch` of the three; its lines go to a queue as (downloader, line), None at the end."""

    def __init__(self, name: str, demo: Demo, lines: queue.Queue[tuple[Downloader, str | None]]) -> None:
        self.name = name
        self.process = subprocess.Popen(
            demo.command("prefetch", demo.s3.uri("llama"), "--progress", "plain"),
            env=demo.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._lines = lines
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stderr or ():
            self._lines.put((self, line.rstrip("\n")))
        self._lines.put((self, None))

    def directory(self) -> str:
        """What it printed on stdout; it has ended."""
        assert self.process.stdout
        return self.process.stdout.read().strip()


@contextlib.contextmanager
def three(demo: Demo) -> Iterator[tuple[list[Downloader], queue.Queue[tuple[Downloader, str | None]]]]:
    lines: queue.Queue[tuple[Downloader, str | None]] = queue.Queue()
    everyone = [Downloader(name, demo, lines) for name in "abc"]
    try:
        yield everyone, lines
    finally:
        for one in everyone:
            one.process.kill()
            one.process.wait()


def race(demo: Demo) -> str:
    """Three at once, the leader killed part-way; the directory that the others print."""
    print(f"\n$ mx prefetch {demo.s3.uri('llama')}        three times at once: a, b, c", flush=True)
    leaders: list[Downloader] = []
    killed: Downloader | None = None
    with three(demo) as (everyone, lines):
        running = set(everyone)
        while running:
            try:
                who, line = lines.get(timeout=DEADLINE)
            except queue.Empty:
                raise Broken(f"nothing happened for {DEADLINE:.0f} s") from None
            if line is None:
                running.discard(who)
                continue
            print(f"  {who.name}: {demo.short(line)}", flush=True)
            if line.startswith("leading term"):
                leaders.append(who)
            share = re.match(r"transfer +(\d+) %", line)
            if share and killed is None and KILL_AFTER <= int(share[1]) < 100:
                who.process.kill()
                killed = who
                print(f"  --- kill -9 {who.name}, the leader ---", flush=True)
        codes = {one: one.process.wait(DEADLINE) for one in everyone}
        left = [one for one in everyone if one is not killed]
        places = {one.directory() for one in left}
    if killed is None or leaders[:1] != [killed] or len(leaders) != 2:
        raise Broken("a leader should have been killed, and one of the others should have taken over")
    if [codes[one] for one in left] != [0, 0] or len(places) != 1:
        raise Broken(f"both others should have ended with the same directory (exit codes {list(codes.values())})")
    print(f"  {leaders[1].name} took over from {killed.name}; both others print {demo.short(*places)}", flush=True)
    return places.pop()


@contextlib.contextmanager
def peer(demo: Demo, directory: str) -> Iterator[subprocess.Popen[str]]:
    """A process that begins to hold the directory's files in memory."""
    command = demo.command("serve", directory, "--device", "cpu", "--quiet")
    process = subprocess.Popen(
        command, env=demo.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def address_of(process: subprocess.Popen[str]) -> str:
    """Where a peer answers, once it is ready."""
    ready = process.stdout.readline() if process.stdout else ""
    if not ready:
        raise Broken(f"mx serve exited {process.wait(DEADLINE)}")
    return str(json.loads(ready)["address"])


def pull_from_two(demo: Demo, place: Path, original: Path, directory: str, identity: str) -> None:
    """Two peers hold the same weights; a pull from both goes on when one is killed part-way."""
    print(f"\n$ mx serve {demo.short(directory)} --device cpu        twice: d, e", flush=True)
    with contextlib.ExitStack() as stack:
        killed, left = (stack.enter_context(peer(demo, directory)) for _ in "de")
        addresses = [address_of(killed), address_of(left)]
        for address, name in zip(addresses, "de", strict=True):
            demo.name(address, name)
        demo.mx("peers")
        demo.mx("pull", identity, "--to", str(place / "f"))
        # Pulls of this size take a moment. Relays that hold their breath make it certain that both peers are being read.
        relays = [stack.enter_context(serving.slow(address, EACH_GIVES)) for address in addresses]
        for relay, name in zip(relays, "de", strict=True):
            demo.name(relay.address, name)
        arguments = ["pull", identity, "--to", str(place / "g"), "--path", "socket"]
        arguments += [word for relay in relays for word in ("--peer", relay.address)]
        print(f"\n$ mx {' '.join(demo.short(word) for word in arguments)}", flush=True)
        puller = subprocess.Popen(
            demo.command(*arguments), env=demo.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        stack.callback(puller.kill)
        for relay in relays:
            relay.wait_full(DEADLINE)
        killed.kill()
        killed.wait()
        print(
            f"  --- kill -9 d, one of two peers: each has given {EACH_GIVES >> 20} of {SIZE >> 20} MiB ---", flush=True
        )
        for relay in relays:
            relay.go()
        said, _ = puller.communicate(timeout=DEADLINE)
        print("".join(f"  {demo.short(line)}\n" for line in said.splitlines()), end="", flush=True)
        if puller.returncode != 0 or f"{relays[0].address} is left" not in said:
            raise Broken(f"the pull should have left d and gone on with e (exit code {puller.returncode})")
        if any(checkpoints.tree(place / name) != checkpoints.tree(original) for name in "fg"):
            raise Broken("what was pulled is not the checkpoint")
        print("  the pull went on with e alone; each file, also of what d had given, is the checkpoint's", flush=True)
        left.send_signal(signal.SIGTERM)
        if left.wait(DEADLINE) != 128 + signal.SIGTERM:
            raise Broken("a peer that is told to stop should have said so")


def show(place: Path) -> None:
    with servers.hadro(place) as server:
        s3 = dataclasses.replace(server, bucket="models")
        s3.make_bucket()
        uri = s3.uri("llama")
        original = checkpoints.make_checkpoint(s3.path("llama"), shards=4, size=SIZE)
        print(f"a checkpoint of {SIZE >> 20} MiB in a local S3 store, {uri}, read at {BANDWIDTH} a second")
        demo = Demo(place, s3)
        directory = race(demo)
        if checkpoints.tree(Path(directory)) != checkpoints.tree(original):
            raise Broken("the snapshot is not the checkpoint")
        if not demo.mx("prefetch", uri) == directory:
            raise Broken("a fourth prefetch should have found the snapshot")
        demo.mx("cache", "verify")
        demo.mx("cache", "ls")
        identity = demo.mx("hash", directory)
        if demo.mx("hash", str(original)) != identity:
            raise Broken("the original and the snapshot should have one identity")
        pull_from_two(demo, place, original, directory, identity)


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="mx-demo-") as place:
        try:
            show(Path(place))
        except Broken as broken:
            print(f"\ndemo: FAILED: {broken}")
            return 1
    print(
        "\ndemo: all of it held: one download for all, a killed leader replaced, a killed peer's part read from another, "
        "every byte verified"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
