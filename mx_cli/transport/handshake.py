"""The server's side of the handshake, and the tokens that it gives.

Nothing is remembered of a stranger: a server nonce proves by itself when and for whom it was made. Only what was used by
somebody who knows a secret is kept, so that it is used once.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from mx_cli.base.errors import AccessDenied
from mx_cli.transport import secret

NONCE_LIFE = 10.0
TOKEN_IDLE = 600.0
_MOST_TOKENS = 10_000
_SEAL = 32


class Handshake:
    """Thread-safe. `known` gives the secrets that are accepted now; it is asked at each handshake."""

    def __init__(
        self,
        known: Callable[[], list[bytes]],
        certificate: bytes,
        generation: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._known = known
        self._certificate = certificate
        self._generation = generation
        self._clock = clock
        self._key = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._used: OrderedDict[bytes, float] = OrderedDict()
        self._tokens: OrderedDict[bytes, float] = OrderedDict()

    def nonce(self, client_nonce: bytes) -> bytes:
        """A server nonce for this client nonce, good for ten seconds."""
        made = secrets.token_bytes(16) + struct.pack(">d", self._clock())
        return made + self._seal(made, client_nonce)

    def _seal(self, made: bytes, client_nonce: bytes) -> bytes:
        return hmac.digest(self._key, made + client_nonce, "sha256")

    def prove(self, client_nonce: bytes, server_nonce: bytes, proof: bytes) -> tuple[bytes, str]:
        """(the server's proof, a new token). Raises AccessDenied, which does not say why; UsageError without secrets."""
        known = self._known()
        refused = AccessDenied("the handshake is refused")
        made = server_nonce[:-_SEAL]
        if len(made) != 24 or not secret.equal(server_nonce[-_SEAL:], self._seal(made, client_nonce)):
            raise refused
        now = self._clock()
        if now - struct.unpack(">d", made[16:])[0] > NONCE_LIFE:
            raise refused
        fields = (self._certificate, client_nonce, server_nonce, self._generation)
        proven = [one for one in known if secret.equal(proof, secret.proof(one, secret.CLIENT, *fields))]
        if not proven or not self._use(server_nonce, now):
            raise refused
        return secret.proof(proven[0], secret.SERVER, *fields), self._new_token(now)

    def _use(self, nonce: bytes, now: float) -> bool:
        with self._lock:
            while self._used and next(iter(self._used.values())) < now - NONCE_LIFE:
                self._used.popitem(last=False)
            if nonce in self._used:
                return False
            self._used[nonce] = now
            return True

    def _new_token(self, now: float) -> str:
        token = secrets.token_hex(32)
        with self._lock:
            self._tokens[_digest(token)] = now
            if len(self._tokens) > _MOST_TOKENS:
                self._tokens.popitem(last=False)
        return token

    def knows(self, token: str) -> bool:
        """Whether the token was given here and not left unused for ten minutes."""
        digest, now = _digest(token), self._clock()
        with self._lock:
            last = self._tokens.pop(digest, None)
            if last is None or now - last > TOKEN_IDLE:
                return False
            # The least recently used one stays in front.
            self._tokens[digest] = now
            return True

    def revoke(self) -> None:
        """Forget all tokens."""
        with self._lock:
            self._tokens.clear()


def _digest(token: str) -> bytes:
    # A look-up takes longer for what begins like a token; nobody can choose how a digest begins.
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
