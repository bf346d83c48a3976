"""The addresses of this machine, and which of them another machine would reach it by."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from dataclasses import dataclass

_RTM_NEWADDR, _RTM_GETADDR, _NLMSG_DONE, _NLMSG_ERROR = 20, 22, 3, 2
_REQUEST_DUMP = 0x301
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_CONTAINER_BRIDGES = ("docker", "br-", "virbr", "cni", "flannel", "cali", "veth", "podman", "lxc", "lxdbr", "kube-")


@dataclass(frozen=True, slots=True)
class Interface:
    """One address of one interface."""

    name: str
    address: str

    @property
    def is_bridge(self) -> bool:
        """Whether it only leads to containers on this host: their subnets are the same on many hosts."""
        return self.name.startswith(_CONTAINER_BRIDGES) or os.path.isdir(f"/sys/class/net/{self.name}/bridge")

    @property
    def is_usable(self) -> bool:
        """Whether it may be reached from other machines. An address on `lo` is not, whatever it looks like."""
        value = ipaddress.ip_address(self.address)
        return self.name != "lo" and not (value.is_loopback or value.is_link_local or value.is_unspecified)


def interfaces() -> list[Interface]:
    """All addresses, v4 before v6, by rtnetlink(7). Raises OSError where there is no netlink."""
    found: list[Interface] = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as sock:
        sock.settimeout(2.0)
        sock.bind((0, 0))
        sock.send(struct.pack("=IHHII", 24, _RTM_GETADDR, _REQUEST_DUMP, 1, 0) + struct.pack("=Bxxxi", 0, 0))
        done = False
        while not done:
            data = sock.recv(1 << 16)
            while len(data) >= 16:
                length, kind = struct.unpack_from("=IH", data)
                if kind in (_NLMSG_DONE, _NLMSG_ERROR) or length < 16:
                    done = True
                    break
                if kind == _RTM_NEWADDR:
                    found += _address(data[16:length])
                data = data[(length + 3) & ~3 :]
    return sorted(set(found), key=lambda one: (":" in one.address, one.name, one.address))


def _address(message: bytes) -> list[Interface]:
    family, _, _, _, index = struct.unpack_from("=BBBBi", message)
    at, values = 8, {}
    while at + 4 <= len(message):
        length, kind = struct.unpack_from("=HH", message, at)
        if length < 4:
            break
        values[kind] = message[at + 4 : at + length]
        at += (length + 3) & ~3
    raw = values.get(_IFA_LOCAL) or values.get(_IFA_ADDRESS)
    if family not in (socket.AF_INET, socket.AF_INET6) or not raw:
        return []
    try:
        return [Interface(socket.if_indextoname(index), socket.inet_ntop(family, raw))]
    except OSError:
        return []


def reachable() -> list[Interface]:
    """The addresses by which others may reach this machine, the likeliest first.

    First the one that the kernel would send from to the outside, then those of real interfaces, then bridges.
    """
    # 192.0.2.0/24 is nobody's (RFC 5737): the route to it is the way to the outside.
    outside = source_address("192.0.2.1", 9)
    usable = [one for one in interfaces() if one.is_usable]
    return sorted(usable, key=lambda one: (one.address != outside, one.is_bridge, ":" in one.address))


def source_address(host: str, port: int) -> str:
    """The address that packets to a host leave from; "" without a route. Blocks while a name is resolved."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        # Connecting a datagram socket sends nothing: it asks the routing table.
        with socket.socket(family, kind, protocol) as sock:
            sock.connect(place)
            return str(sock.getsockname()[0])
    except OSError:
        return ""


def interface_of(address: str) -> str:
    """The name of the interface that has the address; "" where none has it, or nobody can tell."""
    try:
        return next((one.name for one in interfaces() if one.address == address), "")
    except OSError:
        return ""
