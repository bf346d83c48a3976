"""Secrets that peers share, what proves to know one, and the certificate that the proof is bound to.

The NIXL blob that a grant brings is a capability for the whole process, so nobody gets one without a proof in both
directions. A proof is bound to the certificate: what relays a handshake ends TLS with a certificate of its own.
"""

from __future__ import annotations

import base64
import codecs
import contextlib
import hashlib
import hmac
import os
import secrets
import shutil
import ssl
import stat
import string
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from mx_cli.base.errors import FilesystemRefused, MissingCapability, UsageError
from mx_cli.base.filesystem import may

CLIENT, SERVER = b"client", b"server"
SHORTEST = 16
"""Bytes of a secret: who runs a false peer sees a proof, and must not find the secret by trying."""

_LARGEST_FILE = 64 << 10
_BLANK = string.whitespace.encode() + b"\0"
_TOKEN_NAME = "peer-token"
_IN_MEMORY = "/dev/shm"
_OF_ANOTHER = frozenset({"NO_CERTIFICATE_ASSIGNED", "KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH"})
"""OpenSSL's reasons for a key that is of another certificate."""


def read_secrets(path: Path) -> list[bytes]:
    """The secrets of a file, one a line: the first is offered, all are accepted, so they can be rotated.

    White space and NULs around a line and empty lines mean nothing; symlinks (a mounted Secret) are followed. Reads the file at
    each call. Raises UsageError, which never shows a secret, for an unreadable file, a pipe, a short secret, or none at all.
    """
    hint = f"make one: head -c 32 /dev/urandom | base64 > {path}"
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UsageError(
                f"cannot read the file of peer secrets {path}: not a regular file",
                hint="it is read at each handshake, and a pipe can be read only once: give a file",
            )
        with path.open("rb") as file:
            data = file.read(_LARGEST_FILE + 1)
    except OSError as error:
        raise UsageError(f"cannot read the file of peer secrets {path}: {error.strerror}", hint=hint) from None
    if len(data) > _LARGEST_FILE:
        raise UsageError(f"not a file of peer secrets ({path}: more than {_LARGEST_FILE} bytes)", hint=hint)
    found: list[bytes] = []
    for number, line in enumerate(data.removeprefix(codecs.BOM_UTF8).split(b"\n"), 1):
        # NULs are what a machine that lost power leaves of a file: everybody knows those.
        secret = line.strip(_BLANK)
        if 0 < len(secret) < SHORTEST:
            raise UsageError(
                f"a peer secret is too short ({path}, line {number}: {len(secret)} bytes, expected at least {SHORTEST})",
                hint=hint,
            )
        if secret:
            found.append(secret)
    if not found:
        raise UsageError(f"no peer secret in {path}", hint=hint)
    return found


def runtime_secret(runtime_dir: Path | None) -> Path:
    """The file of the secret that this user's own processes on this host share; made when it is missing. Idempotent.

    It lies in `runtime_dir` ($XDG_RUNTIME_DIR), where that is the user's, else in a directory of the user's under the
    temporary one. Raises FilesystemRefused when something of another user is in its place.
    """
    directory = _private_directory(runtime_dir)
    path = directory / _TOKEN_NAME
    if not os.path.lexists(path):
        fd, unfinished = tempfile.mkstemp(prefix=_TOKEN_NAME, dir=directory)
        try:
            with open(fd, "wb") as file:
                file.write(base64.b64encode(secrets.token_bytes(32)) + b"\n")
            # Of two processes that begin at once, one makes the secret of both.
            with contextlib.suppress(FileExistsError):
                os.link(unfinished, path)
        finally:
            os.unlink(unfinished)
    _check_own(path, stat.S_IFREG)
    return path


def _private_directory(runtime_dir: Path | None) -> Path:
    if runtime_dir is not None and _is_own_directory(runtime_dir):
        directory = runtime_dir / "mx"
    else:
        directory = Path(tempfile.gettempdir()) / f"mx-runtime-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        directory.mkdir(0o700)
    _check_own(directory, stat.S_IFDIR)
    return directory


def _is_own_directory(path: Path) -> bool:
    try:
        status = path.stat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and may(os.W_OK | os.X_OK, path)


def _check_own(path: Path, kind: int) -> None:
    status = path.lstat()
    if stat.S_IFMT(status.st_mode) != kind or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise FilesystemRefused(
            f"not private to this user: {path} (owner {status.st_uid}, mode {stat.filemode(status.st_mode)})",
            hint=f"look at it, remove it (rm -r {path}), or share a secret with --peer-token-file FILE",
        )


def proof(
    secret: bytes, role: bytes, certificate: bytes, client_nonce: bytes, server_nonce: bytes, generation: str
) -> bytes:
    """What shows that `role` (CLIENT or SERVER) knows the secret, in this one handshake, over this one certificate.

    `certificate` is the SHA-256 of the server's certificate as each side sees it.
    """
    fields = (b"mx peer proof 1", role, certificate, client_nonce, server_nonce, generation.encode())
    message = b"".join(struct.pack(">I", len(field)) + field for field in fields)
    return hmac.digest(secret, message, "sha256")


def equal(left: bytes, right: bytes) -> bool:
    """Takes as long for a wrong proof as for a right one."""
    return hmac.compare_digest(left, right)


@dataclass(frozen=True, slots=True)
class Certificate:
    """What a listener shows: its TLS context, and the SHA-256 of its certificate."""

    context: ssl.SSLContext
    sha256: bytes


def load_certificate(certificate: Path, key: Path | None) -> Certificate:
    """An operator's own certificate (PEM, the chain after it). Raises UsageError when it does not load."""
    context = _server_context()
    try:
        for path in filter(None, (certificate, key)):
            if not stat.S_ISREG(path.stat().st_mode):
                raise ValueError(f"{path} is not a regular file, and is read twice")
        first = _first_certificate(certificate.read_text("ascii"))
        context.load_cert_chain(certificate, key, password=_no_pass_phrase)
    except (OSError, ValueError) as error:
        said = _in_words(error)
        hint = f"{certificate} is to hold the key too, or --tls-key FILE: PEM, without a pass phrase"
        raise UsageError(f"cannot use the certificate {certificate} and its key: {said}", hint=hint) from None
    return Certificate(context, hashlib.sha256(first).digest())


def _in_words(error: OSError | ValueError) -> str:
    if isinstance(error, ssl.SSLError) and error.reason in _OF_ANOTHER:
        return "the key is not that of the file's first certificate"
    if isinstance(error, UnicodeDecodeError):
        return "not in PEM form"
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def _no_pass_phrase() -> str:
    """Without this OpenSSL would ask for one on the terminal."""
    raise ValueError("the key is encrypted with a pass phrase")


def make_certificate() -> Certificate:
    """A self-signed certificate with a key that exists only in this process. Takes some milliseconds.

    Raises MissingCapability where neither the package `cryptography` nor the program `openssl` is there.
    """
    pem = _made_by_cryptography() or _made_by_openssl()
    if not pem:
        raise MissingCapability(
            "nothing here can make a certificate (the package cryptography is not installed)",
            hint="pip install 'mx-cli[peer]', or give --tls-cert FILE --tls-key FILE",
        )
    context = _server_context()
    _load(context, pem)
    return Certificate(context, hashlib.sha256(_first_certificate(pem.decode())).digest())


def _load(context: ssl.SSLContext, pem: bytes) -> None:
    """SSLContext loads keys from files only, and this one is to be on no disk: where that can be, in memory."""
    fd = os.memfd_create("mx-certificate", os.MFD_CLOEXEC)
    try:
        os.write(fd, pem)
        with contextlib.suppress(FileNotFoundError):
            context.load_cert_chain(f"/proc/self/fd/{fd}")
            return
    finally:
        os.close(fd)
    # Without /proc memory has no name.
    with tempfile.NamedTemporaryFile(prefix="mx-", dir=_IN_MEMORY if may(os.W_OK, Path(_IN_MEMORY)) else None) as file:
        file.write(pem)
        file.flush()
        context.load_cert_chain(file.name)


def _made_by_cryptography() -> bytes:
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        return b""
    import datetime

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "mx")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=3650))
        .sign(key, hashes.SHA256())
    )
    encoding = serialization.Encoding.PEM
    private = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return private + certificate.public_bytes(encoding)


def _made_by_openssl() -> bytes:
    program = shutil.which("openssl")
    if program is None:
        return b""
    request = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout - -out - -days 3650 -subj /CN=mx"
    done = subprocess.run([program, *request.split()], capture_output=True, stdin=subprocess.DEVNULL, timeout=30)
    return done.stdout if done.returncode == 0 else b""


def _first_certificate(pem: str) -> bytes:
    """DER of the first certificate of a PEM text. Raises ValueError."""
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    start = pem.find(begin)
    stop = pem.find(end, start)
    if start < 0 or stop < 0:
        raise ValueError("no certificate in PEM form")
    return ssl.PEM_cert_to_DER_cert(pem[start : stop + len(end)])


def _server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET
    # Nobody resumes: each connection is dialled for its own sake.
    context.num_tickets = 0
    context.set_alpn_protocols(["http/1.1"])
    return context


def client_context(ca: Path | None = None) -> ssl.SSLContext:
    """For dialling peers. Without a `ca` any certificate will do: the proof is bound to it. Raises UsageError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    if ca is None:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context
    try:
        context.load_verify_locations(cafile=None if ca.is_dir() else ca, capath=ca if ca.is_dir() else None)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"cannot read the CA bundle {ca}: {error}") from None
    return context
