"""Secrets, proofs and certificates of peers."""

from __future__ import annotations

import hashlib
import os
import ssl
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from mx_cli.base.errors import FilesystemRefused, MissingCapability, UsageError
from mx_cli.transport import secret
from tests.rig import servers
from tests.support import capability

LONG = b"0123456789abcdef"
OTHER = b"another-secret-of-peers"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (LONG, [LONG]),
        (LONG + b"\n", [LONG]),
        (LONG + b"\r\n", [LONG]),
        (b"\n\n" + LONG + b"\n  \n" + OTHER + b"\r\n\n", [LONG, OTHER]),
        (b"  " + LONG + b"\t\n", [LONG]),
        (b"\xef\xbb\xbf" + LONG + b"\r\n", [LONG]),
    ],
)
def test_a_secret_is_a_line(tmp_path: Path, text: bytes, expected: list[bytes]) -> None:
    (tmp_path / "secret").write_bytes(text)
    assert secret.read_secrets(tmp_path / "secret") == expected


def test_p38_a_mounted_secret_is_a_symlink(tmp_path: Path) -> None:
    (tmp_path / "..data").mkdir()
    (tmp_path / "..data" / "token").write_bytes(LONG + b"\n")
    (tmp_path / "token").symlink_to("..data/token")
    assert secret.read_secrets(tmp_path / "token") == [LONG]


@pytest.mark.parametrize(
    "text", [b"", b"\n \r\n", bytes(64), b"short-secret!\n", LONG + b"\nshort-secret!\n", b"x" * (65 << 10)]
)
def test_what_is_no_secret_is_refused_with_the_line_that_makes_one(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "secret"
    path.write_bytes(text)
    with pytest.raises(UsageError) as refused:
        secret.read_secrets(path)
    assert refused.value.hint == f"make one: head -c 32 /dev/urandom | base64 > {path}"
    assert "short-secret!" not in str(refused.value.to_json())
    made = subprocess.run(["bash", "-c", refused.value.hint.partition(": ")[2]], check=True)
    assert made.returncode == 0
    assert len(secret.read_secrets(path)) == 1


@pytest.mark.parametrize("name", ["missing", ".", "pipe"])
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    """A pipe, of a shell's <(…) for instance, is empty when it is read again."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="cannot read"):
        secret.read_secrets(tmp_path / name)


def test_the_secret_of_a_login(tmp_path: Path) -> None:
    path = secret.runtime_secret(tmp_path)
    assert path.parent == tmp_path / "mx"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    [made] = secret.read_secrets(path)
    assert secret.runtime_secret(tmp_path) == path
    assert secret.read_secrets(path) == [made]
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("runtime_dir", [None, Path("/nowhere/at/all")])
def test_without_a_runtime_directory_the_secret_lies_under_the_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime_dir: Path | None
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path = secret.runtime_secret(runtime_dir)
    assert path.parent == tmp_path / f"mx-runtime-{os.geteuid()}"
    assert len(secret.read_secrets(path)) == 1


def test_processes_that_begin_at_once_share_one_secret(tmp_path: Path) -> None:
    together = threading.Barrier(8)
    found: list[list[bytes]] = []

    def begin() -> None:
        together.wait()
        found.append(secret.read_secrets(secret.runtime_secret(tmp_path)))

    threads = [threading.Thread(target=begin) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert all(one == found[0] for one in found)


def _open_to_others(directory: Path) -> None:
    directory.mkdir()
    directory.chmod(0o755)


def _symlink(directory: Path) -> None:
    (directory.parent / "elsewhere").mkdir(0o700)
    directory.symlink_to("elsewhere")


def _readable_token(directory: Path) -> None:
    directory.mkdir(0o700)
    (directory / "peer-token").write_bytes(LONG)
    (directory / "peer-token").chmod(0o644)


def _symlink_to_token(directory: Path) -> None:
    directory.mkdir(0o700)
    (directory.parent / "token").write_bytes(LONG)
    (directory.parent / "token").chmod(0o600)
    (directory / "peer-token").symlink_to("../token")


@pytest.mark.parametrize("prepare", [_open_to_others, _symlink, _readable_token, _symlink_to_token])
def test_what_others_could_have_put_there_is_refused(tmp_path: Path, prepare: object) -> None:
    assert callable(prepare)
    prepare(tmp_path / "mx")
    with pytest.raises(FilesystemRefused, match="not private"):
        secret.runtime_secret(tmp_path)


@capability("root")
@pytest.mark.parametrize("name", ["mx", "mx/peer-token"])
def test_what_another_user_owns_is_refused(tmp_path: Path, name: str) -> None:
    secret.runtime_secret(tmp_path)
    os.chown(tmp_path / name, 12345, 12345)
    with pytest.raises(FilesystemRefused, match="12345"):
        secret.runtime_secret(tmp_path)


@capability("root")
def test_the_runtime_directory_of_another_user_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 12345, 12345)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert secret.runtime_secret(tmp_path / "theirs").parent.parent == tmp_path


def test_every_field_counts_in_a_proof() -> None:
    fields = (LONG, secret.CLIENT, b"c" * 32, b"n" * 32, b"s" * 32, "mx-1")
    others = (OTHER, secret.SERVER, b"d" * 32, b"m" * 32, b"t" * 32, "mx-2")
    proofs = {secret.proof(*fields)}
    for at, other in enumerate(others):
        proofs.add(secret.proof(*fields[:at], other, *fields[at + 1 :]))  # type: ignore[arg-type]
    assert len(proofs) == 7


def test_fields_do_not_run_into_each_other() -> None:
    assert secret.proof(LONG, secret.CLIENT, b"ab", b"c", b"d", "e") != secret.proof(
        LONG, secret.CLIENT, b"a", b"bc", b"d", "e"
    )


def shown(certificate: secret.Certificate) -> bytes:
    """SHA-256 of what a client sees."""
    client, server = secret.client_context(), certificate.context
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    near = client.wrap_bio(down, up, server_hostname="x")
    far = server.wrap_bio(up, down, server_side=True)
    pending: list[ssl.SSLObject] = [near, far]
    while pending:
        side = pending.pop(0)
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            pending.append(side)
    return hashlib.sha256(near.getpeercert(binary_form=True) or b"").digest()


def test_a_certificate_of_this_process_alone() -> None:
    one, other = secret.make_certificate(), secret.make_certificate()
    assert shown(one) == one.sha256
    assert one.sha256 != other.sha256


@capability("openssl")
def test_the_program_openssl_makes_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    made = secret.make_certificate()
    assert shown(made) == made.sha256


def test_without_either_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(MissingCapability) as refused:
        secret.make_certificate()
    assert "mx-cli[peer]" in refused.value.hint
    assert "--tls-cert" in refused.value.hint


def test_the_operators_own_certificate(tls: servers.Tls, tmp_path: Path) -> None:
    loaded = secret.load_certificate(Path(tls.cert), Path(tls.key))
    assert shown(loaded) == loaded.sha256
    (tmp_path / "no.pem").write_text("nothing")
    for cert, key in ((tmp_path / "no.pem", tls.key), (tls.cert, tmp_path / "no.pem"), (tmp_path / "missing", None)):
        with pytest.raises(UsageError, match="certificate"):
            secret.load_certificate(Path(cert), Path(key) if key else None)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="pipe is not a regular file"):
        secret.load_certificate(Path(tls.cert), tmp_path / "pipe")


def test_a_key_of_another_certificate_and_what_is_not_pem(tls: servers.Tls, tmp_path: Path) -> None:
    (tmp_path / "der").write_bytes(ssl.PEM_cert_to_DER_cert(Path(tls.cert).read_text()))
    kinds = [ec.generate_private_key(ec.SECP256R1()), rsa.generate_private_key(65537, 2048)]
    encoding, form, plain = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    for number, key in enumerate(kinds):
        other = tmp_path / f"other-{number}"
        other.write_bytes(key.private_bytes(encoding, form, plain))
        with pytest.raises(UsageError, match="the key is not that of the file's first certificate"):
            secret.load_certificate(Path(tls.cert), other)
    with pytest.raises(UsageError, match="not in PEM form"):
        secret.load_certificate(tmp_path / "der", Path(tls.key))


def test_nobody_is_asked_for_a_pass_phrase(tls: servers.Tls, tmp_path: Path) -> None:
    locked = tmp_path / "locked.pem"
    key = serialization.load_pem_private_key(Path(tls.key).read_bytes(), None)
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"phrase"),
        )
    )
    with pytest.raises(UsageError, match="encrypted with a pass phrase") as refused:
        secret.load_certificate(Path(tls.cert), locked)
    assert "without a pass phrase" in refused.value.hint
