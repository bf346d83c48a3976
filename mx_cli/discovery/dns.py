"""Peers behind one name: every address of a headless Service. Needs no access to any API."""

from __future__ import annotations

import queue
import socket
import threading

from mx_cli.base.address import join_address
from mx_cli.base.cancel import Stop
from mx_cli.base.threads import begin
from mx_cli.discovery.static import only_address
from mx_cli.model.record import Record, Sighting

SLICE = 0.1


class _Lookup:
    """One question to the resolver, in a thread of its own: it may take as long as it likes, and nothing can stop it."""

    def __init__(self, name: str, port: int) -> None:
        self._name, self._port = name, port
        self._answers: queue.SimpleQueue[list[str] | str] = queue.SimpleQueue()
        begin(threading.Thread(target=self._ask, name="resolve", daemon=True))

    def _ask(self) -> None:
        try:
            found = socket.getaddrinfo(self._name, self._port, type=socket.SOCK_STREAM)
        except OSError as error:
            self._answers.put(error.strerror or str(error))
        except UnicodeError as error:
            self._answers.put(str(error))
        else:
            self._answers.put(list(dict.fromkeys(str(address[0]) for *_, address in found)))

    def answer(self, timeout: float, stop: Stop) -> list[str] | str | None:
        """The addresses, or why there are none; None when it is still on its way."""
        waited = 0.0
        while True:
            try:
                return self._answers.get(timeout=SLICE)
            except queue.Empty:
                stop.check()
                waited += SLICE
                if waited >= timeout:
                    return None


class DnsDirectory:
    """See the port `Directory`: every A and AAAA of `name`, asked for afresh at each look, for `timeout` seconds."""

    def __init__(self, name: str, port: int, timeout: float) -> None:
        self._name, self._port, self._timeout = name, port, timeout
        self._reason = ""
        self._unanswered: _Lookup | None = None
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return f"dns:{join_address(self._name, self._port)}"

    def publish(self, record: Record) -> None:
        """Nothing to do: who runs the Service knows its pods."""

    beat = publish
    remove = publish

    def sightings(self, stop: Stop) -> list[Sighting]:
        with self._lock:
            # A resolver that is silent is not asked once more: threads would pile up.
            lookup = self._unanswered or _Lookup(self._name, self._port)
            self._unanswered = lookup
            answer = lookup.answer(self._timeout, stop)
            if answer is not None:
                self._unanswered = None
        if isinstance(answer, list):
            self._reason = ""
            return [Sighting(only_address(host, self._port)) for host in answer]
        self._reason = f"{self._name} does not resolve ({answer or f'no answer for {self._timeout:g} s'})"
        return []

    def records(self, stop: Stop) -> list[Record]:
        return [sighting.record for sighting in self.sightings(stop)]

    def reason(self) -> str:
        return self._reason
