"""What a peer answers: the handshake, what it holds, grants, the bytes of path `socket`, and its health.

    GET    /livez /readyz /metrics      anybody: health and counts, no names
    POST   /v1/hello /v1/session        anybody: the handshake; it gives a bearer token
    GET    /v1/source /v1/manifest      what the peer holds
    POST   /v1/grants                   a slot (200), or a place in the queue (202)
    POST   /v1/grants/ID                a beat
    DELETE /v1/grants/ID                the reader leaves
    GET    /v1/files/PATH               bytes, with the header X-Mx-Grant and ?offset=&length=

Bodies are JSON with "proto": 1. An error is {"proto": 1, "error": {...}} as in base.errors, with the status that fits.
"""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from mx_cli.base.address import split_address
from mx_cli.base.errors import AccessDenied, Incompatible, MxError, NotFound, Unreachable, UsageError
from mx_cli.model.holding import Holding
from mx_cli.model.record import DRAINING, LOADING, SERVING
from mx_cli.transport import metrics, protocol
from mx_cli.transport.asked import (
    body_of,
    bytes_in,
    common_version,
    mapping_in,
    nonce_in,
    number_in,
    reader_name,
)
from mx_cli.transport.grants import Grants, Place
from mx_cli.transport.handshake import Handshake
from mx_cli.transport.http1 import Request, Response, answer
from mx_cli.transport.protocol import FILES, GRANT_HEADER, GRANTS, MANIFEST, POLL, PROTO

UPDATING = "updating"
GONE = 410

_STATUS: dict[str, int] = {
    "usage": 400,
    "access-denied": 403,
    "not-found": 404,
    "incompatible": 426,
    "unreachable": 503,
}


class Holder(Protocol):
    """What holds the weights, behind the control channel. Called from many threads."""

    generation: str
    holding: Holding | None

    def facts(self) -> dict[str, Any]:
        """More fields of /v1/source: device, host facts, uri, revision. Does not block."""

    def access(self, reader: Mapping[str, Any]) -> dict[str, Any]:
        """The body of a new grant. `reader` holds what the reader says of itself, and the grant's id under `grant`."""

    def read(self, file: str, offset: int, length: int) -> Iterator[memoryview]:
        """Bytes of a file in pieces of a few MiB. Raises NotFound."""


def is_data(request: Request) -> bool:
    """Whether a request moves much: such ones must not starve beats and handshakes."""
    return request.path.startswith(FILES) or request.path == MANIFEST


class Control:
    """The routes of one peer. `handle` is what the door calls. Thread-safe.

    `secrets` is asked at each handshake. `certificate` is the SHA-256 of what TLS shows. `published` says whether
    discovery knows of the peer: until then it answers, but is not ready.
    """

    def __init__(
        self,
        holder: Holder,
        secrets: Callable[[], list[bytes]],
        certificate: bytes,
        slots: int,
        ttl: float = 30.0,
        published: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._holder = holder
        self._handshake = Handshake(secrets, certificate, holder.generation, clock)
        self._published = published
        self.grants = Grants(slots, ttl, clock)
        self._paused = ""
        self._lock = threading.Lock()
        self._compressing = threading.Lock()
        self._manifest: tuple[Holding, bytes] | None = None
        self._sent = 0
        self._handshakes = 0
        self._refused = 0

    @property
    def state(self) -> str:
        return self._paused or (LOADING if self._holder.holding is None else SERVING)

    # --- changes of state

    def prepare(self, holding: Holding) -> None:
        """Do what the first reader of a holding would have to wait for, before it is held. Blocks: a second for 50,000 tensors."""
        self._compressed(holding)
        # Computed once, and kept by the holding.
        _ = holding.digest

    def pause(self) -> None:
        """Give no new grants while the weights change; who asks is told to come back."""
        self._paused = self._paused or UPDATING

    def resume(self) -> None:
        """Undo `pause`; what drains goes on draining."""
        if self._paused == UPDATING:
            self._paused = ""

    def revoke(self) -> None:
        """End all grants; their readers learn it from their next beat, and streams under way break off."""
        self.grants.revoke()

    def drain(self, timeout: float) -> list[str]:
        """Give no more grants, and wait for the open ones for `timeout` seconds. Blocks. What is left is then ended.

        The names of the readers that were still reading; empty when all had finished. Nothing is answered afterwards
        but health.
        """
        self._paused = DRAINING
        late = self.grants.wait_empty(timeout)
        self.grants.close()
        self._handshake.revoke()
        return [reader_name(reader) for reader in late]

    # --- requests

    def handle(self, request: Request) -> Response:
        """The answer to a request."""
        try:
            return self._route(request)
        except MxError as error:
            return _refusal(error)

    def _route(self, request: Request) -> Response:
        path, method = request.path, "GET" if request.method == "HEAD" else request.method
        match (method, path):
            case ("GET", "/livez"):
                return Response(200, b"ok\n")
            case ("GET", "/readyz"):
                ready = self.state == SERVING and self._published()
                word = "ok" if ready else self.state if self.state != SERVING else "not published"
                return Response(200 if ready else 503, word.encode() + b"\n")
            case ("GET", "/metrics"):
                return Response(200, self._metrics().encode(), {"Content-Type": "text/plain; version=0.0.4"})
            case ("POST", protocol.HELLO):
                return self._hello(request)
            case ("POST", protocol.SESSION):
                return self._session(request)
        scheme, _, token = request.header("authorization").partition(" ")
        if scheme.lower() != "bearer" or not self._handshake.knows(token.strip()):
            denied = AccessDenied("no session, or it has ended", hint="shake hands first")
            return _refusal(denied, 401, {"WWW-Authenticate": "Bearer"})
        response = self._trusted_route(request, method, path)
        response.trusted = True
        return response

    def _trusted_route(self, request: Request, method: str, path: str) -> Response:
        grant = path.removeprefix(GRANTS + "/")
        try:
            match (method, path):
                case ("GET", protocol.SOURCE):
                    return answer(self._source())
                case ("GET", protocol.MANIFEST):
                    return self._manifest_of(request)
                case ("POST", protocol.GRANTS):
                    return self._grant(body_of(request))
                case ("POST", _) if grant != path:
                    return self._beat(grant, body_of(request))
                case ("DELETE", _) if grant != path:
                    return self._leave(grant, body_of(request))
                case ("GET", _) if path.startswith(FILES):
                    return self._file(request, path.removeprefix(FILES))
            raise NotFound(f"nothing here ({method} {path})")
        except MxError as error:
            return _refusal(error)

    def _hello(self, request: Request) -> Response:
        body = body_of(request)
        version = common_version(body.get("proto"))
        nonce = self._handshake.nonce(nonce_in(body))
        return answer({"proto": version, "nonce": nonce.hex(), "generation": self._holder.generation})

    def _session(self, request: Request) -> Response:
        body = body_of(request)
        nonce, server_nonce, offered = nonce_in(body), bytes_in(body, "server_nonce"), bytes_in(body, "proof")
        try:
            proof, token = self._handshake.prove(nonce, server_nonce, offered)
        except AccessDenied:
            with self._lock:
                self._refused += 1
            raise
        except UsageError:
            raise Unreachable("this peer cannot read its secrets now") from None
        with self._lock:
            self._handshakes += 1
        return answer({"proto": PROTO[1], "proof": proof.hex(), "token": token})

    def _holding(self) -> Holding:
        holding = self._holder.holding
        if holding is None:
            raise Unreachable("this peer is loading its weights", retry_after=POLL)
        return holding

    def _source(self) -> dict[str, Any]:
        holding = self._holding()
        manifest = holding.manifest
        return {
            "proto": PROTO[1],
            "generation": self._holder.generation,
            "version": holding.version,
            "state": self.state,
            "identities": [identity.id for identity in holding.identities],
            "manifest": holding.digest,
            "uri": manifest.uri,
            "revision": manifest.revision,
            "size": sum(record.size for record in manifest.files),
            "readers": self.grants.readers,
            "slots": self.grants.slots,
            "queue": self.grants.queued,
            "better": self.grants.better(),
            **self._holder.facts(),
        }

    def _manifest_of(self, request: Request) -> Response:
        compressed = self._compressed(self._holding())
        headers = {"Content-Type": "application/json"}
        if "gzip" in request.header("accept-encoding"):
            return Response(200, compressed, {**headers, "Content-Encoding": "gzip"})
        return Response(200, gzip.decompress(compressed), headers)

    def _compressed(self, holding: Holding) -> bytes:
        with self._compressing:
            # A holding never changes: a new version is a new one.
            if self._manifest is None or self._manifest[0] is not holding:
                text = json.dumps({"proto": PROTO[1], **holding.to_json()}, ensure_ascii=False, separators=(",", ":"))
                self._manifest = (holding, gzip.compress(text.encode("utf-8", "surrogateescape"), 1))
            return self._manifest[1]

    def _grant(self, body: Mapping[str, Any]) -> Response:
        self._holding()
        if self._paused:
            raise Unreachable(f"this peer gives no grants ({self.state})", retry_after=POLL)
        reader = dict(mapping_in(body, "reader"))
        asked = self.grants.ask(reader, str(body.get("ticket", "")))
        if isinstance(asked, Place):
            better = self.grants.better(asked.position, str(reader.get("address", "")))
            place = {"proto": PROTO[1], "ticket": asked.ticket, "position": asked.position, "better": better}
            return answer({**place, "retry_after": POLL}, 202, {"Retry-After": str(round(POLL))})
        try:
            access = self._holder.access({**reader, "grant": asked})
        except BaseException:
            self.grants.end(asked)
            raise
        return answer({**self._pulse(), "grant": asked, "queue": self.grants.queued, **access})

    def _pulse(self) -> dict[str, Any]:
        """What each beat tells the reader: other weights, or an end that is near."""
        return {
            "proto": PROTO[1],
            "version": self._holding().version,
            "state": self.state,
            "ttl": self.grants.ttl,
            "better": self.grants.better(),
        }

    def _beat(self, grant: str, body: Mapping[str, Any]) -> Response:
        self.grants.beat(grant)
        self._hear(body)
        return answer(self._pulse())

    def _leave(self, grant: str, body: Mapping[str, Any]) -> Response:
        self._hear(body)
        self.grants.end(grant)
        return answer({"proto": PROTO[1]})

    def _hear(self, body: Mapping[str, Any]) -> None:
        """A reader that verified bytes and serves them now is a better peer for those who wait."""
        serving = body.get("serving")
        if isinstance(serving, str) and serving and len(serving) < 300 and body.get("verified"):
            split_address(serving)
            self.grants.praise(serving)

    def _file(self, request: Request, path: str) -> Response:
        grant = request.header(GRANT_HEADER)
        try:
            self.grants.check(grant)
        except NotFound as error:
            # The file is there: who was sent away must not take it for missing.
            return _refusal(error, GONE)
        record = self._holding().manifest.record(path)
        if record is None:
            raise NotFound(f"no such file here: {path}")
        offset = number_in(request, "offset", 0)
        length = number_in(request, "length", max(0, record.size - offset))
        if offset + length > record.size:
            return _refusal(UsageError(f"outside the file ({path}: {offset}+{length}, it has {record.size})"), 416)
        pieces = self._holder.read(path, offset, length)
        headers = {"Content-Type": "application/octet-stream"}
        return Response(200, b"", headers, self._counted(grant, pieces), length)

    def _counted(self, grant: str, pieces: Iterator[memoryview]) -> Iterator[memoryview]:
        for piece in pieces:
            self.grants.check(grant)
            yield piece
            with self._lock:
                self._sent += len(piece)

    def _metrics(self) -> str:
        holding = self._holder.holding
        rows = [
            ("readers", "gauge", "grants that are open", self.grants.readers),
            ("slots", "gauge", "grants that may be open at once", self.grants.slots),
            ("queue", "gauge", "readers that wait for a slot", self.grants.queued),
            ("grants_total", "counter", "grants given", self.grants.given),
            ("grants_expired_total", "counter", "grants whose reader fell silent", self.grants.expired),
            ("bytes_served_total", "counter", "bytes sent over path socket", self._sent),
            ("handshakes_total", "counter", "handshakes that succeeded", self._handshakes),
            ("handshakes_refused_total", "counter", "handshakes without a known secret", self._refused),
            ("version", "gauge", "version of the weights", holding.version if holding else 0),
        ]
        return metrics.text(rows, self.state, (LOADING, SERVING, UPDATING, DRAINING))


def _refusal(error: MxError, status: int = 0, headers: Mapping[str, str] | None = None) -> Response:
    known = dict(headers or {})
    if isinstance(error, Unreachable) and error.retry_after is not None:
        known["Retry-After"] = str(max(1, round(error.retry_after)))
    body = {"proto": PROTO[1], "error": error.to_json()}
    if isinstance(error, Incompatible):
        body["speaks"] = list(PROTO)
    return answer(body, status or _STATUS.get(error.name, 500), known)
