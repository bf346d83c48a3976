"""What transport/nixl.py promises, and the habits of NIXL that it absorbs.

A habit that is gone ends its test as `mended by a newer NIXL`: then the cure can go, too.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mx_cli.base.errors import MissingCapability, StillLanding, TransportFailed, UsageError
from mx_cli.engine.buffers import Pool
from mx_cli.engine.ports import Memory, ReadItem
from mx_cli.engine.threads import Flight
from mx_cli.model.manifest import Entry
from mx_cli.transport import nixl, nixl_env, nixl_needs
from mx_cli.transport.nixl import Agent, Network
from mx_cli.transport.paths import NixlRead
from tests.rig import capabilities
from tests.rig.nixl_source import MIB, Source, source
from tests.support import ROOT, capability, need

pytestmark = capability("nixl")

TCP = Network(tcp_only=True)
DEADLINE = 30.0
numbers = itertools.count(1)


def mended(habit: str) -> None:
    pytest.xfail(f"mended by a newer NIXL: {habit}")


def fresh(role: str) -> str:
    return f"{role}-{os.getpid()}-{next(numbers)}"


class Target:
    """An agent with a buffer of its own, all zeros."""

    def __init__(self, network: Network, size: int) -> None:
        import numpy as np

        self.agent = Agent(fresh("target"), network)
        self.memory = np.zeros(size, np.uint8)
        self.address = self.memory.ctypes.data
        self.agent.register([(self.address, size, -1)])

    def connect(self, peer: Source) -> None:
        self.agent.connect(peer.blob, peer.name, peer.digest)

    def read(self, peer: Source, size: int | None = None, at: int = 0) -> nixl.Read:
        size = peer.size if size is None else size
        return self.agent.read(
            peer.name, nixl.rows([self.address + at], [size]), nixl.rows([peer.address + at], [size])
        )

    def bring(self, peer: Source) -> None:
        finish(self.read(peer))

    def reach(self, peer: Source) -> None:
        self.connect(peer)
        self.bring(peer)


def finish(read: nixl.Read) -> None:
    end = time.monotonic() + DEADLINE
    read.post()
    while not read.done():
        assert time.monotonic() < end, read.what
        time.sleep(0.0005)
    read.release()


def until(happens: Callable[[], bool]) -> bool:
    end = time.monotonic() + DEADLINE
    while not happens() and time.monotonic() < end:
        time.sleep(0.005)
    return happens()


@pytest.fixture
def target() -> Iterator[Callable[..., Target]]:
    made: list[Target] = []

    def make(network: Network = TCP, size: int = 4 * MIB) -> Target:
        made.append(Target(network, size))
        return made[-1]

    yield make
    for one in made:
        one.agent.destroy()


def python(
    code: str, env: dict[str, str] | None = None, *arguments: str, prefix: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Runs a program in a process of its own; UCX finds what the test gives and nothing else."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("UCX_", "NIXL_"))}
    return subprocess.run(
        [*prefix, sys.executable, "-c", textwrap.dedent(code), *arguments],
        env=clean | (env or {}),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )


RAW = """
    import sys, time
    sys.path.insert(0, {root!r})
    import nixl_cu12._api as api
    agent = api.nixl_agent("raw", api.nixl_agent_config(backends=[]))
    agent.create_backend("UCX", {{}})
"""
OURS = """
    import sys, time
    sys.path.insert(0, {root!r})
    from mx_cli.transport.nixl import Agent
    agent = Agent("ours")
    agent.blob()
"""
RAW, OURS = RAW.format(root=str(ROOT)), OURS.format(root=str(ROOT))


# --- the process ---------------------------------------------------------------------------------------------------


ASKED = """
    import json, os
    began = time.process_time()
    time.sleep(1)
    idle = time.process_time() - began
    variables = [name for name in os.environ if name.startswith(("UCX_", "NIXL_"))]
    print("saw", json.dumps([idle, "torch" in sys.modules, variables, type(sys.modules["nixl_cu12._api"].nixlBind).__name__]))
"""


class Ended:
    """How a process with an idle agent ended, and what it saw."""

    def __init__(self, program: str) -> None:
        # UCX warns of variables that it does not know: on stdout, if nobody stops it.
        ended = python(program + ASKED, {"UCX_NO_SUCH_THING": "1"})
        self.code, self.said, self.errors = ended.returncode, ended.stdout.splitlines(), ended.stderr
        # What UCX says of itself may come before or after.
        (saw,) = [line for line in self.said if line.startswith("saw ")]
        self.said.remove(saw)
        self.idle, self.torch, self.variables, self.bindings = json.loads(saw.removeprefix("saw "))


@pytest.fixture(scope="module")
def ours() -> Ended:
    return Ended(OURS)


@pytest.fixture(scope="module")
def raw() -> Ended:
    return Ended(RAW)


def test_a_process_that_used_nixl_ends_with_its_own_code(ours: Ended, raw: Ended) -> None:
    assert ours.code == 0
    ended = python(OURS + "    from mx_cli.cli.session import finish\n    finish(5)")
    assert (ended.returncode, ended.stdout, ended.stderr) == (5, "", "")
    if raw.code == 0:
        mended("a process with a UCX backend crashes at its end (with some builds of Python and libc)")


def test_nothing_is_written(ours: Ended, raw: Ended) -> None:
    assert (len(ours.said), ours.errors) == (0, "")
    if len(raw.said) == 0:
        mended("NIXL writes its log to stdout")


def test_the_progress_thread_sleeps(ours: Ended, raw: Ended) -> None:
    """CPU seconds of a second in which nothing happens."""
    assert ours.idle < 0.3
    if raw.idle < 2 * ours.idle:
        mended("the progress thread spins")


def test_others_in_the_process_keep_their_settings(ours: Ended) -> None:
    """Neither the environment nor NIXL's own module is changed for them."""
    assert (ours.variables, ours.bindings) == (["UCX_NO_SUCH_THING"], "module")


@capability("torch")
def test_torch_is_not_imported_for_nixl(ours: Ended) -> None:
    assert not ours.torch
    if python("import sys, nixl\nprint('torch' in sys.modules)").stdout == "False\n":
        mended("importing nixl imports torch")


def test_a_program_that_takes_the_process_over_inherits_no_socket() -> None:
    code = """
    import os
    from mx_cli.cli.session import Session
    print(any("socket:" in os.readlink(f"/proc/self/fd/{fd}") for fd in range(3, 64) if os.path.exists(f"/proc/self/fd/{fd}")))
    session = Session(options={}, config=None, as_json=False, quiet=False, verbose=0)
    session._begin()
    session.prepare_exec()
    sys.stdout.flush()
    os.execv("/bin/sh", ["sh", "-c", "ls -l /proc/self/fd; env"])
    """
    said = python(OURS + code).stdout
    assert said.startswith("True\n")
    assert "/proc/" in said
    assert "socket:" not in said
    assert "UCX_" not in said


def test_without_the_package() -> None:
    code = f"""
    import sys
    sys.path.insert(0, {str(ROOT)!r})
    sys.modules.update(dict.fromkeys(("nixl_cu12", "nixl_cu13")))
    from mx_cli.base.errors import MissingCapability
    from mx_cli.transport.nixl import Agent, missing, ucx_version
    print(missing(), repr(ucx_version()))
    try:
        Agent("a").blob()
    except MissingCapability as error:
        print(error.what, error.hint)
    """
    assert python(code).stdout.splitlines() == [
        "the package nixl is not installed ''",
        "NIXL cannot be used: the package nixl is not installed pip install 'mx-cli[peer]'",
    ]


def test_versions() -> None:
    assert nixl.missing() == ""
    assert re.fullmatch(r"\d+\.\d+\.\d+", nixl.ucx_version())
    assert re.match(r"\d+\.\d+", nixl.version())


# --- the network ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("network", "said"),
    [
        (Network(interface="nope0"), "--interface nope0: no such network interface"),
        (Network(interface="nope0", loopback=True), "--interface nope0: no such network interface"),
        (Network(interface=""), "--interface : no such network interface"),
        (Network(data_ports="20000"), "--data-ports 20000: expected FIRST-LAST"),
        (Network(data_ports="20010-20000"), "--data-ports 20010-20000"),
        (Network(data_ports="0-5"), "--data-ports 0-5"),
        (Network(data_ports="1-65536"), "--data-ports 1-65536"),
    ],
)
def test_a_wrong_network_is_named(network: Network, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        Agent("a", network)


@pytest.mark.parametrize("value", ["posix,cma", "cma", "^tcp"])
def test_transports_without_tcp_are_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", value)
    with pytest.raises(UsageError, match="UCX_TLS"):
        Agent("a")


@pytest.mark.parametrize("value", ["tcp", "tcp,cma", "all", "^posix"])
def test_transports_with_tcp_are_used(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", value)
    agent = Agent(fresh("a"))
    assert agent.blob()
    agent.destroy()


def test_the_users_own_variables_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    with nixl_env.environment({"UCX_NET_DEVICES": "eth7", "UCX_TLS": "tcp"}):
        assert (os.environ["UCX_NET_DEVICES"], os.environ["UCX_TLS"]) == ("lo", "tcp")
    assert (os.environ["UCX_NET_DEVICES"], "UCX_TLS" in os.environ) == ("lo", False)


def test_what_is_missing_of_several_interfaces_is_left_out() -> None:
    assert Network(interface="nope0, lo").variables() == {"UCX_NET_DEVICES": "lo"}


def test_no_usable_network_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "nope0")
    with pytest.raises(
        TransportFailed, match=r"UCX cannot be started .*the environment has UCX_NET_DEVICES=nope0"
    ) as e:
        Agent("a", Network(loopback=True)).blob()
    assert "=lo" not in e.value.what


@contextlib.contextmanager
def few_ports(free: int) -> Iterator[str]:
    """A range of four ports of which so many are free on lo."""
    with contextlib.ExitStack() as stack:
        for first in range(29000, 32000, 4):
            held = []
            for port in range(first, first + 4):
                one = stack.enter_context(socket.socket())
                with contextlib.suppress(OSError):
                    one.bind(("127.0.0.1", port))
                    held.append(one)
            if len(held) == 4:
                break
        for one in held[:free]:
            one.close()
        yield f"{first}-{first + 3}"


def test_no_free_port_is_said() -> None:
    """UCX by itself would look for one for ever, inside the call."""
    with few_ports(0) as ports:
        agent = Agent(fresh("a"), Network(loopback=True, data_ports=ports))
        with pytest.raises(TransportFailed, match=f"{ports}.*no port is free on lo"):
            agent.blob()
        agent.destroy()


@pytest.mark.parametrize("left", [1, 3, 6, 12, 31, 40])
def test_few_descriptors_end_nobody(left: int) -> None:
    """UCX by itself would end the process over some of them. The agent can be had once there is room."""
    ended = python(f"""
        import os, resource, sys
        from mx_cli.base.errors import TransportFailed
        from mx_cli.transport import nixl_env
        from mx_cli.transport.nixl import Agent
        nixl_env.load()
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        # Not of those that listing them needs itself.
        used = len(os.listdir("/proc/self/fd")) - 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + {left}, most))
        agent = Agent("small")
        try:
            agent.blob()
            print("there")
        except TransportFailed as error:
            print(error.what)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        print(len(agent.blob()) > 0)
        from mx_cli.cli.session import finish
        finish(0)
    """)
    assert ended.returncode == 0, ended.stderr
    said, again = ended.stdout.splitlines()
    assert said == "there" if left > nixl_needs.DESCRIPTORS else "descriptors are left" in said
    assert again == "True"


def sockets(pid: int) -> list[tuple[str, int, str, int, bool]]:
    """(own address, own port, other address, other port, whether it listens) of a process's IPv4 TCP sockets."""
    own = descriptors(pid)
    found = []
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[9] in own:
            here, there = (part.split(":") for part in fields[1:3])
            listens = fields[3] == "0A"
            found.append((address(here[0]), int(here[1], 16), address(there[0]), int(there[1], 16), listens))
    return found


def descriptors(pid: int | str) -> set[str]:
    """Inodes of a process's sockets."""
    links = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    return {found for link in links for found in re.findall(r"socket:\[(\d+)\]", link)}


def address(word: str) -> str:
    return ".".join(str(byte) for byte in reversed(bytes.fromhex(word)))


def test_the_source_listens_where_it_should_and_connects_to_nobody(target: Callable[..., Target]) -> None:
    network = {"loopback": True, "data_ports": "28000-28999"}
    with source(fresh("source"), network=network) as peer:
        one = target()
        one.connect(peer)
        one.bring(peer)
        found = sockets(peer.pid)
        listening = {port for _, port, _, _, listens in found if listens}
        assert listening
        assert {place for place, _, _, _, listens in found if listens} == {"127.0.0.1"}
        assert all(28000 <= port <= 28999 for port in listening)
        # UCX also connects to itself.
        assert {port for _, port, _, other, listens in found if not listens and other not in listening} <= listening


# --- reading -------------------------------------------------------------------------------------------------------


PROBE = """
    import json, sys
    sys.path.insert(0, {root!r})
    import numpy as np
    from mx_cli.base.errors import TransportFailed
    from mx_cli.transport import nixl
    network, name, blob, digest, address, size, deadline = json.loads(sys.argv[1])
    agent = nixl.Agent("probe", nixl.Network(**network), trace=True)
    memory = np.zeros(size, np.uint8)
    agent.register([(memory.ctypes.data, size, -1)])
    agent.connect(bytes.fromhex(blob), name, digest)
    try:
        rows = [nixl.rows([place], [size]) for place in (memory.ctypes.data, address)]
        found = nixl.probe(agent, name, rows[0], rows[1], deadline=deadline)
        print(found.path, found.emulated, found.rdma, found.bytes_per_second > 0, memory.min(), memory.max())
    except TransportFailed as error:
        print(error.what)
"""


def probed(peer: Source, network: dict[str, Any], *, deadline: float = DEADLINE, **process: Any) -> str:
    wish = json.dumps([network, peer.name, peer.blob.hex(), peer.digest, peer.address, peer.size, deadline])
    ended = python(PROBE.format(root=str(ROOT)), process.get("env"), wish, prefix=process.get("prefix", ()))
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout.strip()


def test_a_probe_names_the_path() -> None:
    with source(fresh("source"), network={"loopback": True}) as peer:
        assert probed(peer, {}) == "cma/memory False False True 7 7"
        assert probed(peer, {"tcp_only": True}) == "tcp/lo (software emulation) True False True 7 7"


def test_who_asks_for_ucxs_log_sees_it() -> None:
    ended = python(OURS.replace('"ours"', '"ours", trace=True'), {"UCX_LOG_LEVEL": "info"})
    assert ended.stdout == ""
    assert "UCX  INFO" in ended.stderr


@pytest.mark.parametrize("level", ["DEBUG", "nonsense"])
def test_a_level_of_the_user_brings_nothing_to_stdout(level: str) -> None:
    assert python(OURS, {"NIXL_LOG_LEVEL": level}).stdout == ""


def test_an_error_has_ucxs_own_words() -> None:
    """The silent emulation as an error: what agents for GPU memory rely on."""
    assert nixl_env.variables(Network(), gpu=True)["UCX_PROTO_EMULATION_ENABLE"] == "n"
    with source(fresh("source")) as peer:
        said = probed(peer, {"tcp_only": True}, env={"UCX_PROTO_EMULATION_ENABLE": "n"})
        assert re.match(r"reading from .*: nixlRemoteDisconnectError.*No zero-copy protocol found for get", said)


@pytest.mark.parametrize("network", [TCP, Network()])
def test_bytes_arrive(target: Callable[..., Target], network: Network) -> None:
    with source(fresh("source"), fill=0x5A, size=9 * MIB) as peer:
        one = target(network, 9 * MIB)
        one.connect(peer)
        one.bring(peer)
        assert (one.memory == 0x5A).all()
        one.agent.destroy()
        assert peer.end() == 0


def test_only_the_rows_are_written(target: Callable[..., Target]) -> None:
    with source(fresh("source")) as peer:
        one = target()
        one.connect(peer)
        places, lengths = [5, 1000, 2 * MIB], [7, 4096, MIB - 1]
        rows = [nixl.rows([base + place for place in places], lengths) for base in (one.address, peer.address)]
        finish(one.agent.read(peer.name, rows[0], rows[1]))
        expected = one.memory * 0
        for place, length in zip(places, lengths, strict=True):
            expected[place : place + length] = 7
        assert (one.memory == expected).all()


def test_neighbours_become_one_operation(target: Callable[..., Target], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIXL_TELEMETRY_ENABLE", "y")
    with source(fresh("source")) as peer:
        one = target()
        one.connect(peer)

        def operations(step: int) -> int:
            places = [number * step for number in range(64)]
            rows = [nixl.rows([base + place for place in places], [4096] * 64) for base in (one.address, peer.address)]
            read = one.agent.read(peer.name, rows[0], rows[1])
            read.post()
            assert until(read.done)
            count = int(one.agent._nixl.get_xfer_telemetry(read._handle).descCount)
            read.release()
            return count

        assert operations(4096) == 1
        assert operations(8192) == 64


def test_threads_share_an_agent_and_it_can_be_destroyed_under_them(target: Callable[..., Target]) -> None:
    """Reads of several threads are right; destroying the agent ends them with an error and harms nothing."""
    with source(fresh("source"), size=32 * MIB) as peer:
        one = target(Network(), 32 * MIB)
        one.connect(peer)
        started, ended = threading.Barrier(5), []

        def work(first: int) -> None:
            try:
                for at in range(first * MIB, peer.size, 4 * MIB):
                    finish(one.read(peer, MIB, at))
                started.wait(DEADLINE)
                while True:
                    finish(one.read(peer, MIB, first * MIB))
            except TransportFailed as error:
                ended.append(error.what)

        threads = [threading.Thread(target=work, args=[first]) for first in range(4)]
        for thread in threads:
            thread.start()
        started.wait(DEADLINE)
        assert (one.memory == 7).all()
        one.agent.destroy()
        for thread in threads:
            thread.join(DEADLINE)
        assert len(ended) == 4
        assert all("was destroyed" in what for what in ended)


def test_what_was_not_registered_is_refused(target: Callable[..., Target]) -> None:
    with source(fresh("source")) as peer:
        one = target()
        with pytest.raises(TransportFailed, match=peer.name):
            one.read(peer)
        one.connect(peer)
        for own, theirs in ((one.address, peer.secret), (one.address, peer.address + peer.size), (4096, peer.address)):
            with pytest.raises(TransportFailed, match="NotFound"):
                one.agent.read(peer.name, nixl.rows([own], [4096]), nixl.rows([theirs], [4096]))
        one.bring(peer)


# --- failures ------------------------------------------------------------------------------------------------------


def test_a_killed_source_is_an_error_and_its_successor_can_be_read(target: Callable[..., Target]) -> None:
    name = fresh("source")
    one = target()
    with source(name) as peer:
        one.connect(peer)
        one.bring(peer)
        peer.kill()
        with pytest.raises(TransportFailed, match=name):
            one.bring(peer)
        with pytest.raises(TransportFailed, match=name):
            one.reach(peer)
    with source(name, fill=8) as peer:
        one.connect(peer)
        one.bring(peer)
    assert (one.memory == 8).all()


def test_a_restarted_peer_of_the_same_name_is_refused_by_nixl(target: Callable[..., Target]) -> None:
    name = fresh("source")
    one = target()
    with source(name) as old, source(name, fill=8) as new:
        one.connect(old)
        one.bring(old)
        try:
            one.agent._nixl.add_remote_agent(new.blob)
            mended("a peer of the same name with other addresses is refused")
        except one.agent._errors:
            pass
        one.connect(new)
        one.bring(new)
        assert (one.memory == 8).all()


@pytest.mark.parametrize("network", [TCP, Network()])
def test_a_frozen_source_costs_the_deadline(target: Callable[..., Target], network: Network) -> None:
    with source(fresh("source")) as peer:
        one = target(network)
        peer.freeze()
        one.connect(peer)
        rows = [nixl.rows([place], [MIB]) for place in (one.address, peer.address)]
        with pytest.raises(TransportFailed, match=r"no byte within 0\.3 s"):
            nixl.probe(one.agent, peer.name, rows[0], rows[1], deadline=0.3)
        one.agent.destroy()


@pytest.fixture
def two_hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces, joined: hosts a (10.77.0.1) and b (10.77.0.2)."""
    need("netns", "mount", "ip")
    a, b = names = (f"mx-{os.getpid()}-a", f"mx-{os.getpid()}-b")
    commands = [f"netns add {a}", f"netns add {b}", f"link add eth7 netns {a} type veth peer name eth7 netns {b}"]
    for number, name in enumerate(names, 1):
        commands += [f"-n {name} addr add 10.77.0.{number}/24 dev eth7"]
        commands += [f"-n {name} link set {device} up" for device in ("lo", "eth7")]
    try:
        for command in commands:
            ip(command)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True, capture_output=True)


def test_another_host_is_read_over_its_network(two_hosts: tuple[str, str]) -> None:
    a, b = (("ip", "netns", "exec", name) for name in two_hosts)
    wish = {"tcp_only": True, "interface": "eth7"}
    with source(fresh("source"), network=wish, prefix=a) as peer:
        assert probed(peer, wish, prefix=b) == "tcp/eth7 (software emulation) True False True 7 7"


def test_a_network_that_swallows_packets_costs_the_deadline(two_hosts: tuple[str, str]) -> None:
    """UCX by itself would block for two minutes, inside the call that connects."""
    a, b = (("ip", "netns", "exec", name) for name in two_hosts)
    with source(fresh("source"), network={"tcp_only": True}, prefix=a) as peer:
        ip(f"-n {two_hosts[1]} neigh replace 10.77.0.1 lladdr 02:00:00:00:00:99 dev eth7 nud permanent")
        assert probed(peer, {"tcp_only": True}, deadline=0.5, prefix=b).endswith("no byte within 0.5 s")


def test_connections_are_kept_alive(target: Callable[..., Target]) -> None:
    """A host that is gone is seen within seconds: the kernel's timer of UCX's connections is no longer than that."""
    with source(fresh("source")) as peer:
        one = target()
        one.connect(peer)
        one.bring(peer)
        # A connection that has just sent something shows another timer first.
        waits: list[int] = []
        end = time.monotonic() + 20
        while not waits and time.monotonic() < end:
            lines = [line.split() for line in Path(f"/proc/{peer.pid}/net/tcp").read_text().splitlines()]
            own = descriptors(peer.pid)
            waits = [
                int(line[5].partition(":")[2], 16) for line in lines if line[9] in own and line[5].startswith("02:")
            ]
            time.sleep(0.05)
        assert waits
        assert max(waits) <= 2.5 * os.sysconf("SC_CLK_TCK")


def given_up(one: Target, peer: Source) -> nixl.Read:
    """A READ of everything from a source that is frozen before anything arrives, zeroed, and released."""
    finish(one.read(peer, 4096))
    peer.freeze()
    read = one.read(peer)
    read.post()
    read.release()
    one.memory[:] = 0
    return read


def test_destroying_the_agent_is_a_barrier(target: Callable[..., Target]) -> None:
    """The only one: what was released lands all the same."""
    with source(fresh("source"), size=64 * MIB) as peer:
        one = target(size=64 * MIB)
        one.connect(peer)
        given_up(one, peer)
        peer.thaw()
        if not until(lambda: bool(one.memory[-1] == 7)):
            mended("a READ that was given up lands")

        two, after = target(size=64 * MIB), target(size=64 * MIB)
        two.connect(peer)
        given_up(two, peer)
        two.agent.destroy()
        two.memory[:] = 0
        peer.thaw()
        # The source answers in order: when a later reader has all, nothing of the former is on its way.
        after.connect(peer)
        after.bring(peer)
        assert not two.memory.any()


def test_a_destroyed_agent_says_so(target: Callable[..., Target]) -> None:
    with source(fresh("source")) as peer:
        one = target()
        one.connect(peer)
        read = one.read(peer)
        one.agent.destroy()
        one.agent.destroy()
        for call in (read.post, read.done, one.agent.blob, lambda: one.connect(peer), lambda: one.read(peer)):
            with pytest.raises(TransportFailed, match="destroyed"):
                call()
        read.release()
        one.agent.disconnect(peer.name)


def test_leaving_destroys_all_agents(target: Callable[..., Target]) -> None:
    agents = [target().agent for _ in range(2)]
    nixl.leave()
    for agent in agents:
        with pytest.raises(TransportFailed, match="destroyed"):
            agent.blob()


# --- blobs ---------------------------------------------------------------------------------------------------------


def sha256(blob: bytes) -> str:
    return hashlib.sha256(blob).hexdigest()


def test_a_bad_blob_never_reaches_nixl_which_would_forget_the_peer(target: Callable[..., Target]) -> None:
    with source(fresh("source")) as peer:
        one = target()
        one.connect(peer)
        cut = peer.blob[:-20]
        for blob, name, digest, said in (
            (cut, peer.name, peer.digest, "is damaged"),
            (b"garbage", peer.name, sha256(b"garbage"), "is not NIXL's"),
            (peer.blob, "other", peer.digest, "another peer's"),
            (bytes(nixl.BLOB_LIMIT + 1), peer.name, "", "too large"),
        ):
            with pytest.raises(TransportFailed, match=said):
                one.agent.connect(blob, name, digest)
        one.bring(peer)
        with pytest.raises(one.agent._errors):
            one.agent._nixl.add_remote_agent(cut)
        if one.agent._nixl.check_remote_metadata(peer.name):
            mended("a malformed blob makes NIXL forget the peer")


def test_a_blob_is_a_capability_for_the_whole_process(target: Callable[..., Target]) -> None:
    """Why it goes to nobody without a proof: edited, it reads memory that was never registered."""
    with source(fresh("source"), size=MIB) as peer:
        one = target(size=MIB)
        edited = peer.blob.replace(peer.address.to_bytes(8, "little"), peer.secret.to_bytes(8, "little"))
        assert edited != peer.blob
        try:
            one.agent.connect(edited, peer.name, sha256(edited))
            rows = [nixl.rows([place], [MIB]) for place in (one.address, peer.secret)]
            finish(one.agent.read(peer.name, rows[0], rows[1]))
        except TransportFailed:
            mended("a blob gives access to memory that was not registered")
        assert (one.memory == 0xEE).all()


# --- GPUs ----------------------------------------------------------------------------------------------------------


def test_an_agent_for_host_memory_refuses_gpus(target: Callable[..., Target]) -> None:
    one = target()
    with pytest.raises(TransportFailed, match="made for host memory only"):
        one.agent.register([(4096, 4096, 0)])
    for devices in ((0, -1), (-1, 0)):
        with pytest.raises(TransportFailed, match="made for host memory only"):
            one.agent.read("peer", nixl.rows([0], [1]), nixl.rows([0], [1]), devices)


@pytest.mark.parametrize("call", [Agent.blob, lambda agent: agent.register([(4096, 4096, 0)])])
def test_an_agent_for_gpus_needs_one(call: Callable[[Agent], object]) -> None:
    agent = Agent(fresh("a"), gpu=True)
    expected = TransportFailed if capabilities.have("gpu") else MissingCapability
    if capabilities.have("gpu") and call is Agent.blob:
        assert agent.blob()
    else:
        with pytest.raises(expected):
            call(agent)
    agent.destroy()


@capability("gpu")
def test_gpu_memory_is_read() -> None:
    """From another process, over a path for device memory; blocks are registered as a whole."""
    import torch

    from mx_cli.transport import cuda

    memory = torch.zeros(8 * MIB, dtype=torch.uint8, device="cuda:0")
    cuda.refuse_virtual({"memory": memory})
    block = cuda.allocation_of(memory.data_ptr())
    assert block.address <= memory.data_ptr() <= block.address + block.length - memory.nbytes
    agent = Agent(fresh("gpu"), gpu=True)
    agent.register([(block.address, block.length, 0)])
    with source(fresh("source"), size=memory.nbytes, device=0) as peer:
        agent.connect(peer.blob, peer.name, peer.digest)
        rows = [nixl.rows([place], [memory.nbytes], 0) for place in (memory.data_ptr(), peer.address)]
        finish(agent.read(peer.name, rows[0], rows[1], (0, 0)))
        assert bool((memory == 7).all())
        agent.destroy()


class SideBySide:
    """A path by three agents to all of a source, a MiB at a time, into memory of its own."""

    def __init__(self, peer: Source, network: Network) -> None:
        self.size = peer.size
        self.agents = [Agent(fresh("one-of-several"), network) for _ in range(3)]
        self.pool = Pool(peer.size)
        capability = {
            "name": peer.name,
            "blob": base64.b64encode(peer.blob).decode(),
            "digest": peer.digest,
            "extents": [["f", 0, peer.size, peer.address, -1]],
        }
        self.path = NixlRead(self.agents[0], capability, [(self.pool.address, peer.size, -1)], 4)
        assert self.path.size == peer.size
        self.path.use_agents(self.agents[1:])

    def bring(self, at: int) -> int:
        item = ReadItem(Entry("f", self.size), at, MIB)
        memory = Memory(((0, MIB, self.pool.address + at),))
        flight = Flight(item, memory)
        self.path.bring(item, memory, flight)
        return flight.moved

    def bring_all(self) -> None:
        with ThreadPoolExecutor(4) as threads:
            assert sum(threads.map(self.bring, range(0, self.size, MIB))) == self.size
        assert bytes(self.pool.view[: self.size]) == bytes([7]) * self.size


def test_agents_copy_side_by_side_and_end_together() -> None:
    with source(fresh("source"), size=8 * MIB) as peer:
        side = SideBySide(peer, Network())
        side.bring_all()
        side.path.close()
        for agent in side.agents:
            with pytest.raises(TransportFailed, match="destroyed"):
                agent.blob()
        with pytest.raises(TransportFailed, match="given up"):
            side.bring(0)


@pytest.mark.parametrize("free", [1, 2])
def test_agents_that_cannot_be_had_are_left_out(free: int) -> None:
    with source(fresh("source"), size=8 * MIB) as peer, few_ports(free) as ports:
        side = SideBySide(peer, Network(loopback=True, data_ports=ports))
        side.bring_all()
        side.path.close()


def test_agents_whose_source_is_killed_end(target: Callable[..., Target]) -> None:
    with source(fresh("source"), size=8 * MIB) as peer:
        side = SideBySide(peer, Network())
        side.bring_all()
        peer.kill()
        for at in range(3):
            with pytest.raises(TransportFailed):
                side.bring(at * MIB)
        side.path.close()


def test_an_agent_that_is_blocked_keeps_no_other_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "LIMIT", 0.1)
    with source(fresh("source"), size=MIB) as peer:
        side = SideBySide(peer, Network())
        # As by a call that does not come back.
        with side.agents[0]._lock, side.agents[1]._lock, pytest.raises(StillLanding, match="blocked"):
            side.path.close()
        with pytest.raises(TransportFailed, match="destroyed"):
            side.agents[2].blob()
        side.path.close()
