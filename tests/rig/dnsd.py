"""A resolver for one command, in a network of its own: python -m tests.rig.dnsd ZONE -- COMMAND…, run under
`unshare --net --mount`.

ZONE is a JSON file, read again at each question: {"peers.test": ["127.0.0.2", "::2"], "silent.test": null}. A name with
null gets no answer at all, one that is not there does not exist.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

A, AAAA, NXDOMAIN = 1, 28, 3
UNSHARE = ("unshare", "--net", "--mount")


def command(zone: Path) -> tuple[str, ...]:
    """The prefix of a command that is to ask this resolver."""
    return (*UNSHARE, sys.executable, "-m", "tests.rig.dnsd", str(zone), "--")


def reply(question: bytes, zone: Path) -> bytes | None:
    labels, at = [], 12
    while length := question[at]:
        labels.append(question[at + 1 : at + 1 + length].decode())
        at += 1 + length
    (kind,) = struct.unpack("!H", question[at + 1 : at + 3])
    names = json.loads(zone.read_text())
    name = ".".join(labels).lower()
    if names.get(name, ()) is None:
        return None
    found = [ipaddress.ip_address(text) for text in names.get(name, ())]
    packed = [address.packed for address in found if (A if address.version == 4 else AAAA) == kind]
    answers = b"".join(struct.pack("!HHHIH", 0xC00C, kind, 1, 0, len(data)) + data for data in packed)
    flags = 0x8180 | (0 if name in names else NXDOMAIN)
    return question[:2] + struct.pack("!HHHHH", flags, 1, len(packed), 0, 0) + question[12 : at + 5] + answers


def serve(server: socket.socket, zone: Path) -> None:
    while True:
        question, asker = server.recvfrom(4096)
        if (answer := reply(question, zone)) is not None:
            server.sendto(answer, asker)


def main() -> int:
    zone, arguments = Path(sys.argv[1]), sys.argv[3:]
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("127.0.0.1", 53))
    threading.Thread(target=serve, args=(server, zone), daemon=True).start()
    with tempfile.NamedTemporaryFile("w", suffix=".conf") as file:
        file.write("nameserver 127.0.0.1\n")
        file.flush()
        subprocess.run(["mount", "--bind", file.name, "/etc/resolv.conf"], check=True)
        return subprocess.run(arguments, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
