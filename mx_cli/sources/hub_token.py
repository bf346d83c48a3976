"""The hub's token: where it comes from, and what is wrong with it, without ever saying it."""

from __future__ import annotations

from pathlib import Path

from mx_cli.base.errors import UsageError
from mx_cli.sources.origin import Context


def find_token(context: Context) -> tuple[str, str]:
    """(token, where it is from), both empty when there is none. Reads at most one file.

    Raises UsageError for a --hf-token-file that cannot be read and for a token that no header can carry.
    """
    settings = context.settings
    if settings.anon:
        return "", ""
    if settings.hf_token_file:
        return _clean(_read(settings.hf_token_file, must=True), str(settings.hf_token_file), context)
    if settings.hf_token:
        return _clean(settings.hf_token, "HF_TOKEN", context)
    for path in _usual_places(context):
        token, source = _clean(_read(path, must=False), str(path), context)
        if token:
            return token, source
    return "", ""


def _usual_places(context: Context) -> list[Path]:
    """Where `hf auth login` puts it."""
    settings = context.settings
    if settings.hf_token_path:
        return [settings.hf_token_path]
    if settings.hf_home:
        return [settings.hf_home / "token"]
    cache = settings.xdg_cache_home or (settings.home / ".cache" if settings.home else None)
    return [cache / "huggingface" / "token"] if cache else []


def _read(path: Path, *, must: bool) -> str:
    try:
        return path.read_text("utf-8").removesuffix("\n")
    except (OSError, ValueError) as error:
        if not must:
            return ""
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(f"cannot read the token file {path}: {reason}") from None


def _clean(raw: str, source: str, context: Context) -> tuple[str, str]:
    token = raw.strip().strip("\"'").strip()
    if not token:
        return "", ""
    if not token.isascii() or not token.isprintable() or " " in token:
        raise UsageError(
            f"the token from {source} holds characters that no token has (spaces, line ends or others inside)",
            hint="write the token alone on one line",
        )
    if token != raw:
        context.notice(f"the token from {source} had white space or quotes around it, which were left out")
    return token, source
