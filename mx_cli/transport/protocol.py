"""What both ends of the control channel have to agree on."""

from __future__ import annotations

PROTO = (1, 1)
"""The wire versions that this mx speaks: lowest, highest."""

NONCE = 32
"""Bytes of a client's nonce."""

POLL = 1.0
"""Seconds between two looks of a reader in the queue."""

FILES = "/v1/files/"
GRANTS = "/v1/grants"
MANIFEST = "/v1/manifest"
SOURCE = "/v1/source"
HELLO = "/v1/hello"
SESSION = "/v1/session"
GRANT_HEADER = "x-mx-grant"
