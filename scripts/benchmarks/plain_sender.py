"""Sends a number of bytes out of touched memory to each who connects and asks, over plain TCP or plain TLS."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import sys
import threading

from mx_cli.engine.buffers import Pool
from mx_cli.transport.secret import make_certificate

STEP = 4 << 20


def main() -> None:
    size = int(sys.argv[1])
    pool = Pool(size)
    ports = {}
    for kind, context in (("tcp", None), ("tls", make_certificate().context)):
        listener = socket.create_server(("127.0.0.1", 0))
        ports[kind] = listener.getsockname()[1]
        threading.Thread(target=_serve, args=(listener, context, pool.view[:size]), daemon=True).start()
    print(json.dumps(ports), flush=True)
    sys.stdin.read()


def _serve(listener: socket.socket, context: ssl.SSLContext | None, view: memoryview) -> None:
    while True:
        plain, _ = listener.accept()
        sock = context.wrap_socket(plain, server_side=True) if context else plain
        with contextlib.suppress(OSError), sock:
            sock.recv(1)
            for at in range(0, len(view), STEP):
                sock.sendall(view[at : at + STEP])


if __name__ == "__main__":
    main()
