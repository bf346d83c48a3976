"""Peers whose addresses are known."""

from __future__ import annotations

from mx_cli.base.address import join_address
from mx_cli.base.cancel import Stop
from mx_cli.model.record import UNKNOWN, Record, Sighting


def only_address(host: str, port: int) -> Record:
    """A record of which nothing but the address is known: the handshake tells the rest."""
    address = join_address(host, port)
    return Record(name=address, generation="", address=address, state=UNKNOWN)


class StaticDirectory:
    """See the port `Directory`: always the same addresses."""

    def __init__(self, addresses: tuple[tuple[str, int], ...]) -> None:
        self._records = [only_address(host, port) for host, port in dict.fromkeys(addresses)]

    def __str__(self) -> str:
        return "static:" + ",".join(record.address for record in self._records)

    def publish(self, record: Record) -> None:
        """Nothing to do: who looks for peers was told where they are."""

    beat = publish
    remove = publish

    def sightings(self, stop: Stop) -> list[Sighting]:
        return [Sighting(record) for record in self._records]

    def records(self, stop: Stop) -> list[Record]:
        return list(self._records)

    def reason(self) -> str:
        return ""
