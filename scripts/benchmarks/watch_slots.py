"""The most readers that any of these peers had at a time: HOST:PORT… are asked until stdin says something."""

from __future__ import annotations

import http.client
import select
import sys

from mx_cli.transport.secret import client_context

EVERY = 0.2
NAME = b"mxcli_readers "


def main() -> None:
    context = client_context()
    most = 0
    connections: dict[str, http.client.HTTPSConnection] = {}
    while not select.select([sys.stdin], [], [], EVERY)[0]:
        for place in sys.argv[1:]:
            connection = connections.setdefault(place, http.client.HTTPSConnection(place, timeout=5, context=context))
            try:
                connection.request("GET", "/metrics")
                said = connection.getresponse().read()
            except (OSError, http.client.HTTPException):
                # Not there yet, or busy: it is asked again.
                connections.pop(place).close()
                continue
            most = max(most, 0, *(int(line[len(NAME) :]) for line in said.splitlines() if line.startswith(NAME)))
    print(most)


if __name__ == "__main__":
    main()
