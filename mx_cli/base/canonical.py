"""One spelling for a JSON value, so that a digest of it means the value and not its formatting."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from mx_cli.base.errors import UsageError


def dumps(value: Any) -> bytes:
    """UTF-8 JSON with sorted keys, no spaces and raw non-ASCII text.

    Raises UsageError for text that is not Unicode (lone surrogates) and for numbers that JSON cannot hold.
    """
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"text that is not Unicode: {error.object[error.start : error.end]!r}") from None
    except ValueError as error:
        raise UsageError(f"a value without canonical JSON: {error}") from None


def sha256(value: Any) -> str:
    """Hex SHA-256 of the canonical JSON of `value`."""
    return hashlib.sha256(dumps(value)).hexdigest()
