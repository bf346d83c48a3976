"""Servers on loopback: each in a process of its own, on a port that the kernel chose, ended by its pid."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.parse
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self
from xml.sax.saxutils import escape

from tests.rig import capabilities

HERE = Path(__file__).parent
ACCESS_KEY, SECRET_KEY, REGION = "mxaccess", "mxsecret12345", "us-east-1"
START_SECONDS = 30
# Rules such as `requester` and `private` are for mx, not for the test that fills the bucket.
PUBLIC = {"x-amz-acl": "public-read", "x-test-setup": "1"}


# --- processes -------------------------------------------------------------------------------------------------


def listening_port(pid: int) -> int | None:
    """The TCP port on which the process itself listens, from /proc: nobody else's server can be taken for ours."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(fd)
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                field = line.split()
                if field[3] == "0A" and field[9] in inodes:
                    return int(field[1].rsplit(":", 1)[1], 16)
    return None


def free_port() -> int:
    """A port that was free a moment ago; for servers that don't take port 0."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def free_ports(count: int) -> int:
    """The first of so many neighbouring ports that were free a moment ago."""
    while True:
        first = free_port()
        with contextlib.ExitStack() as held, contextlib.suppress(OSError, OverflowError):
            for port in range(first, first + count):
                held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


@dataclasses.dataclass
class Server:
    process: subprocess.Popen[bytes]
    port: int
    log_path: Path

    @property
    def pid(self) -> int:
        return self.process.pid


def end(process: subprocess.Popen[Any], seconds: float = 5) -> None:
    """SIGTERM, then SIGKILL, to the session that the process leads (it was started with start_new_session)."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signum)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _await_port(process: subprocess.Popen[bytes], log_path: Path) -> int:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(FileNotFoundError, PermissionError):
            port = listening_port(process.pid)
            if port:
                return port
        time.sleep(0.01)
    raise RuntimeError(f"{process.args} does not listen (rc {process.poll()}): {log_path.read_text()[-2000:]}")


@contextlib.contextmanager
def serving(
    command: list[str | Path], place: Path, env: Mapping[str, str] | None = None, fds: tuple[int, ...] = ()
) -> Iterator[Server]:
    """Runs a server until the block ends; its output is in a file in `place`."""
    log_path = place / f"server-{uuid.uuid4().hex[:8]}.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=fds,
            env={"PATH": capabilities.PATH, "HOME": str(place), "PYTHONUNBUFFERED": "1", **(env or {})},
        )
    try:
        yield Server(process, _await_port(process, log_path), log_path)
    finally:
        end(process)


def request(
    method: str, url: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    """One request, without proxies, redirects, retries or a look at the certificate: (status, headers with lower-case
    names, body)."""
    parts = urllib.parse.urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme == "https":
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            host, parts.port, timeout=30, context=context
        )
    else:
        connection = http.client.HTTPConnection(host, parts.port, timeout=30)
    try:
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        connection.request(method, target, body, dict(headers or {}))
        response = connection.getresponse()
        return response.status, {key.lower(): value for key, value in response.getheaders()}, response.read()
    finally:
        connection.close()


def _check(method: str, url: str, body: bytes | None = None, headers: Mapping[str, str] | None = None) -> bytes:
    status, _, data = request(method, url, body, headers)
    if status >= 300:
        raise RuntimeError(f"{method} {url}: {status} {data[:300]!r}")
    return data


# --- faultd and the hub ------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Faultd:
    """See tests/rig/faultd.py for the flags."""

    server: Server
    url: str

    def file(self, flags: str, size: int, name: str) -> str:
        """The URL of a generated file."""
        return f"{self.url}/f/{flags or 'ok'}/{size}/{urllib.parse.quote(name)}"

    def sum(self, size: int, name: str, version: int = 0) -> str:
        """SHA-256 (hex) of a generated file."""
        return _check("GET", f"{self.url}/sum/{size}/{urllib.parse.quote(name, safe='')}/{version}").decode()

    def log(self) -> list[dict[str, Any]]:
        """Every request so far, without those of `sum` and of the controls."""
        entries: list[dict[str, Any]] = json.loads(_check("GET", f"{self.url}/__log"))
        return [entry for entry in entries if not entry["path"].startswith("/sum/")]

    def bytes_served(self, path: str = "") -> int:
        """Body bytes sent for requests whose path contains `path`."""
        return sum(entry["sent"] for entry in self.log() if path in entry["path"])

    def reset(self) -> None:
        _check("GET", f"{self.url}/__reset")


@dataclasses.dataclass
class Hub(Faultd):
    """A hub with one repository (any name reads it)."""

    dir: Path = Path()
    repo: str = "org/model"

    @property
    def env(self) -> dict[str, str]:
        return {"HF_ENDPOINT": self.url}

    @property
    def uri(self) -> str:
        return f"hf://{self.repo}"

    def commit(self, files: Mapping[str, bytes] | Path, branch: str = "main") -> str:
        """Makes a commit of the files (or of a directory's) and moves the branch to it: its sha."""
        sha = (uuid.uuid4().hex + uuid.uuid4().hex)[:40]
        if isinstance(files, Path):
            shutil.copytree(files, self.dir / sha)
        else:
            (self.dir / sha).mkdir()
            for name, data in files.items():
                path = self.dir / sha / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
        self.move(branch, sha)
        return sha

    def move(self, branch: str, sha: str) -> None:
        (self.dir / "refs" / branch).write_text(sha)

    def flags(self, flags: str) -> None:
        """Faults of every later file body; "ok" ends them, and so does reset()."""
        _check("GET", f"{self.url}/__flags/{urllib.parse.quote(flags, safe='')}")


@contextlib.contextmanager
def faultd(
    place: Path, *, host: str = "127.0.0.1", tls: Tls | None = None, hub: Path | None = None
) -> Iterator[Faultd | Hub]:
    """tests/rig/faultd.py; with a directory `hub` it is a hub too."""
    command: list[str | Path] = [sys.executable, HERE / "faultd.py", "0", "--host", host]
    if tls:
        command += ["--tls", tls.cert, tls.key]
    if hub:
        (hub / "refs").mkdir(parents=True, exist_ok=True)
        command += ["--hf", hub]
    shown = f"[{host}]" if ":" in host else host
    with serving(command, place) as server:
        url = f"{'https' if tls else 'http'}://{shown}:{server.port}"
        yield Hub(server, url, dir=hub) if hub else Faultd(server, url)


# --- S3 ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class S3:
    """One bucket of an S3 server (path style). `env` is what mx needs to read it."""

    endpoint: str
    bucket: str
    anonymous: bool = False

    @property
    def env(self) -> dict[str, str]:
        env = {"MX_ENDPOINT_URL": self.endpoint, "AWS_ENDPOINT_URL_S3": self.endpoint}
        env |= {"AWS_REGION": REGION, "AWS_DEFAULT_REGION": REGION}
        if not self.anonymous:
            env |= {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
        return env

    def uri(self, key: str = "") -> str:
        return f"s3://{self.bucket}/{key}"

    def put(self, key: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Makes or overwrites an object; `headers` (x-amz-checksum-crc32c …) only where a real store is behind it."""
        _check("PUT", f"{self.endpoint}/{self.bucket}/{urllib.parse.quote(key)}", data, headers)

    def delete(self, key: str) -> None:
        _check("DELETE", f"{self.endpoint}/{self.bucket}/{urllib.parse.quote(key)}")

    def put_tree(self, prefix: str, directory: Path) -> None:
        """Every file under the directory, as PREFIX/relative/path."""
        for path in sorted(directory.rglob("*")):
            if path.is_file():
                self.put(f"{prefix.rstrip('/')}/{path.relative_to(directory)}".lstrip("/"), path.read_bytes())

    def new_bucket(self) -> Self:
        """An empty bucket of the same server."""
        other = dataclasses.replace(self, bucket=f"b-{uuid.uuid4().hex[:10]}")
        other.make_bucket()
        return other

    def make_bucket(self) -> None:
        _check("PUT", f"{self.endpoint}/{self.bucket}")


@dataclasses.dataclass
class S3Stub(S3):
    """moto behind tests/rig/s3stub.py: has a request log, takes rules. Readable without credentials too."""

    def put(self, key: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        super().put(key, data, PUBLIC | dict(headers or {}))

    def delete(self, key: str) -> None:
        _check("DELETE", f"{self.endpoint}/{self.bucket}/{urllib.parse.quote(key)}", headers=PUBLIC)

    def make_bucket(self) -> None:
        _check("PUT", f"{self.endpoint}/{self.bucket}", headers=PUBLIC)

    def log(self) -> list[dict[str, Any]]:
        """The requests since reset(), without those of put()."""
        entries: list[dict[str, Any]] = json.loads(_check("GET", f"{self.endpoint}/__log"))
        return [entry for entry in entries if not entry["setup"]]

    def bytes_served(self, path: str = "") -> int:
        return sum(entry["sent"] for entry in self.log() if entry["m"] == "GET" and path in entry["path"])

    def reset(self) -> None:
        _check("GET", f"{self.endpoint}/__reset")


@dataclasses.dataclass
class DirectoryS3(S3):
    """A server over a directory whose sub-directories are the buckets: objects are put by writing files."""

    root: Path = Path()

    def path(self, key: str) -> Path:
        return self.root / self.bucket / key

    def put(self, key: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        if headers:
            raise ValueError("this server keeps no metadata")
        path = self.path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def delete(self, key: str) -> None:
        self.path(key).unlink()

    def make_bucket(self) -> None:
        (self.root / self.bucket).mkdir()


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


@dataclasses.dataclass
class NginxS3(DirectoryS3):
    """nginx as a fast read-only S3: the listings are files, written anew with each put. Signatures are not checked."""

    lists: Path = Path()

    def put(self, key: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        super().put(key, data, headers)
        self.write_lists()

    def delete(self, key: str) -> None:
        super().delete(key)
        self.write_lists()

    def put_tree(self, prefix: str, directory: Path) -> None:
        shutil.copytree(directory, self.path(prefix), dirs_exist_ok=True, copy_function=_link_or_copy)
        self.write_lists()

    def make_bucket(self) -> None:
        super().make_bucket()
        self.write_lists()

    def write_lists(self) -> None:
        base = self.root / self.bucket
        files = {str(path.relative_to(base)): path.stat() for path in sorted(base.rglob("*")) if path.is_file()}
        place = self.lists / self.bucket
        place.mkdir(parents=True, exist_ok=True)
        prefixes = {""}
        for key in files:
            parts = key.split("/")
            for count in range(1, len(parts) + 1):
                start = "/".join(parts[:count])
                prefixes |= {start, start + "/"}
        for prefix in prefixes:
            text = self._listing(prefix, {key: st for key, st in files.items() if key.startswith(prefix)})
            for name in {urllib.parse.quote(prefix, safe=safe) for safe in ("", "/")}:
                path = place / f"{name}.xml"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)

    def _listing(self, prefix: str, files: Mapping[str, os.stat_result]) -> str:
        rows = [
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>&quot;{int(st.st_mtime):x}-{st.st_size:x}&quot;</ETag><Size>{st.st_size}</Size></Contents>"
            for key, st in files.items()
        ]
        return (
            '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>{self.bucket}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(files)}</KeyCount>"
            f"<MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>{''.join(rows)}</ListBucketResult>"
        )


@contextlib.contextmanager
def s3stub(place: Path, **rules: str | int) -> Iterator[S3Stub]:
    """moto with faults: s3stub(place, slow503=6, mutate="shard:1")."""
    command: list[str | Path] = [sys.executable, HERE / "s3stub.py", "0"]
    # moto's own port is in the same process: the URL that s3stub prints last is the one to use.
    with serving([*command, *(f"{key}={value}" for key, value in rules.items())], place) as server:
        url = _printed(server, "http://")
        stub = S3Stub(url, "").new_bucket()
        stub.reset()
        yield stub


def _printed(server: Server, start: str) -> str:
    """The first line of the server's output that begins so."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.process.poll() is None:
        for line in server.log_path.read_text().splitlines(keepends=True):
            if line.startswith(start) and line.endswith("\n"):
                return line.strip()
        time.sleep(0.01)
    raise RuntimeError(f"the server printed no {start}…: {server.log_path.read_text()[-2000:]}")


@contextlib.contextmanager
def hadro(place: Path) -> Iterator[DirectoryS3]:
    """A read-only S3 over a directory that checks signatures."""
    root = place / "hadro"
    root.mkdir()
    keys = ["--access-key", ACCESS_KEY, "--secret-key", SECRET_KEY, "--region", REGION]
    program = capabilities.program("hadro") or "hadro"
    with serving([program, "--host", "127.0.0.1", "--port", "0", "--log-level", "error", *keys, root], place) as server:
        yield DirectoryS3(f"http://127.0.0.1:{server.port}", "", root=root).new_bucket()


@contextlib.contextmanager
def rclone_s3(place: Path) -> Iterator[DirectoryS3]:
    """rclone's S3 over a directory; it checks signatures."""
    root = place / "rclone"
    root.mkdir()
    program = capabilities.program("rclone") or "rclone"
    keys = f"{ACCESS_KEY},{SECRET_KEY}"
    options = ["--addr", "127.0.0.1:0", "--auth-key", keys, "--config", "/dev/null", "--dir-cache-time", "0s"]
    with serving([program, "serve", "s3", *options, root], place) as server:
        yield DirectoryS3(f"http://127.0.0.1:{server.port}", "", root=root).new_bucket()


@dataclasses.dataclass
class Nginx:
    """nginx over a directory: plain HTTP, HTTPS when there is a certificate, and a static S3."""

    url: str
    tls_url: str
    root: Path
    s3: NginxS3
    s3_tls: NginxS3


NGINX_CONF = """
worker_processes {workers}; daemon off; pid {place}/pid; error_log {place}/error.log; {user}
events {{ worker_connections 512; }}
http {{
  access_log {log}; keepalive_requests 1000000; sendfile on; tcp_nopush on; types {{ }} default_type application/octet-stream;
  client_body_temp_path {place}/b; proxy_temp_path {place}/p; fastcgi_temp_path {place}/f;
  uwsgi_temp_path {place}/u; scgi_temp_path {place}/s;
  server {{
    listen 127.0.0.1:{port};
    {tls}
    root {root};
    location ~ "^/(b-[0-9a-f]{{10}})/?$" {{
      default_type application/xml; root {lists};
      try_files "/$1/$arg_prefix.xml" /empty.xml =404;
    }}
    location / {{ }}
  }}
}}
"""
NO_OBJECTS = (
    '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
    "<KeyCount>0</KeyCount><MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated></ListBucketResult>"
)


@contextlib.contextmanager
def nginx(place: Path, tls: Tls | None = None, *, workers: int = 1, log: bool = True) -> Iterator[Nginx]:
    home = place / "nginx"
    root, lists = home / "root", home / "lists"
    root.mkdir(parents=True)
    lists.mkdir()
    (lists / "empty.xml").write_text(NO_OBJECTS)
    with contextlib.ExitStack() as stack:
        # nginx refuses port 0, but takes over sockets that are named in its variable NGINX.
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2 if tls else 1)]
        for sock in sockets:
            # nginx takes them as they are: of two workers that hear of one connection, one would wait for the next.
            sock.setblocking(False)
        ports = [sock.getsockname()[1] for sock in sockets]
        lines = ""
        if tls:
            lines = f"listen 127.0.0.1:{ports[1]} ssl; ssl_certificate {tls.cert}; ssl_certificate_key {tls.key};"
        conf = home / "nginx.conf"
        user = "user root;" if os.geteuid() == 0 else ""
        access = f"{home}/access.log" if log else "off"
        values = {"place": home, "root": root, "lists": lists, "port": ports[0], "tls": lines, "user": user}
        conf.write_text(NGINX_CONF.format(**values, workers=workers, log=access))
        fds = tuple(sock.fileno() for sock in sockets)
        env = {"NGINX": "".join(f"{fd};" for fd in fds)}
        program = capabilities.program("nginx") or "nginx"
        stack.enter_context(serving([program, "-c", conf, "-p", home, "-e", home / "error.log"], place, env, fds))
        urls = [f"http://127.0.0.1:{ports[0]}", f"https://localhost:{ports[-1]}"]
        plain = NginxS3(urls[0], "", root=root, lists=lists).new_bucket()
        secure = dataclasses.replace(plain, endpoint=urls[1])
        yield Nginx(urls[0], urls[1] if tls else "", root, plain, secure)


# --- Google Cloud Storage ----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Gcs:
    """One bucket of fake-gcs-server."""

    endpoint: str
    bucket: str

    @property
    def env(self) -> dict[str, str]:
        return {"STORAGE_EMULATOR_HOST": self.endpoint}

    def uri(self, key: str = "") -> str:
        return f"gs://{self.bucket}/{key}"

    def put(self, key: str, data: bytes) -> None:
        name = urllib.parse.quote(key, safe="")
        url = f"{self.endpoint}/upload/storage/v1/b/{self.bucket}/o?uploadType=media&name={name}"
        _check("POST", url, data, {"Content-Type": "application/octet-stream"})

    def put_tree(self, prefix: str, directory: Path) -> None:
        for path in sorted(directory.rglob("*")):
            if path.is_file():
                self.put(f"{prefix.rstrip('/')}/{path.relative_to(directory)}".lstrip("/"), path.read_bytes())

    def new_bucket(self) -> Gcs:
        other = Gcs(self.endpoint, f"b-{uuid.uuid4().hex[:10]}")
        body = json.dumps({"name": other.bucket}).encode()
        _check("POST", f"{self.endpoint}/storage/v1/b?project=p", body, {"Content-Type": "application/json"})
        return other


@contextlib.contextmanager
def fake_gcs(place: Path) -> Iterator[Gcs]:
    port = free_port()
    host = f"127.0.0.1:{port}"
    program = capabilities.fake_gcs_server() or Path("fake-gcs-server")
    options = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "memory", "-log-level", "error"]
    names = ["-external-url", f"http://{host}", "-public-host", host]
    with serving([program, *options, *names], place):
        yield Gcs(f"http://{host}", "").new_bucket()


# --- TLS ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Tls:
    """A private CA and a certificate of it for localhost, 127.0.0.1 and ::1 (PEM files)."""

    ca: Path
    cert: Path
    key: Path


def make_tls(place: Path, address: str = "127.0.0.1", days: float = 30) -> Tls:
    """Certificates for localhost, ::1 and an address, good from yesterday until so many days from now."""
    import datetime
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    now = datetime.datetime.now(datetime.UTC)

    def builder(subject: str, issuer: str, public_key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]) for name in (subject, issuer)]
        made = x509.CertificateBuilder().subject_name(names[0]).issuer_name(names[1]).public_key(public_key)
        made = made.serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(days=1))
        return made.not_valid_after(now + datetime.timedelta(days=days))

    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    identifier = x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key())
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    ca = builder("mx test CA", "mx test CA", ca_key.public_key())
    ca = ca.add_extension(x509.BasicConstraints(True, None), True).add_extension(usage, True)
    ca_cert = ca.add_extension(identifier, False).sign(ca_key, hashes.SHA256())
    names = [x509.DNSName("localhost"), *(x509.IPAddress(ipaddress.ip_address(ip)) for ip in (address, "::1"))]
    leaf = builder("localhost", "mx test CA", key.public_key())
    leaf = leaf.add_extension(x509.SubjectAlternativeName(names), False)
    leaf = leaf.add_extension(x509.BasicConstraints(False, None), True)
    leaf = leaf.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False)
    authority = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier)
    cert = leaf.add_extension(authority, False).sign(ca_key, hashes.SHA256())
    pem, secret = serialization.Encoding.PEM, serialization.NoEncryption()
    tls = Tls(place / "ca.crt", place / "tls.crt", place / "tls.key")
    tls.ca.write_bytes(ca_cert.public_bytes(pem))
    tls.cert.write_bytes(cert.public_bytes(pem))
    tls.key.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, secret))
    return tls
