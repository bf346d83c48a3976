"""Where credentials come from: programs, files and services, each of which may say anything, or nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.rig import cachecheck
from tests.rig.scripted import Asked, Scripted, published, scripted
from tests.rig.scripted_origins import Bucket, GoogleBucket
from tests.rig.servers import Tls, request
from tests.support import Mx, Result, Running, capability, clean_env, safetensors_bytes

WEIGHTS = safetensors_bytes({"w": ("U8", (1000,), None)})
OBJECTS = {"m/model.safetensors": WEIGHTS}
GOOD = {"AccessKeyId": "AKIAGOOD", "SecretAccessKey": "s", "Token": "t", "Expiration": "2099-01-01T00:00:00Z"}
SECRET = "SECRETWORD99"


def fetched(mx: Mx, env: Mapping[str, str], config: str = "", keys: list[str] | None = None) -> Result:
    """`keys` collects whose signatures came."""
    aws = mx.home / ".aws"
    aws.mkdir(exist_ok=True)
    (aws / "config").write_text(config)
    with scripted(Bucket(OBJECTS)) as server:
        options = {"AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL_S3": server.url, "MX_RETRY_FOR": "1s"}
        result = mx("prefetch", "s3://b/m", env={**options, **env})
    found = {asked.headers["Authorization"].partition("Credential=")[2].partition("/")[0] for asked in server.asked}
    if keys is not None:
        keys += sorted(found)
    return result


def refused(result: Result, *words: str, code: int = 11) -> None:
    result.exits(code)
    assert "Traceback" not in result.err
    assert SECRET not in result.err
    for word in ("AWS credentials", *words):
        assert word in result.err


# --- programs ----------------------------------------------------------------------------------------------------


def program(mx: Mx, text: str) -> str:
    path = mx.home / "credentials.sh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return f"[default]\ncredential_process = {path}\n"


@pytest.mark.parametrize(
    "text",
    [
        "echo hello",
        "echo '[1]'",
        "true",
        f"echo token={SECRET} >&2; exit 3",
        'echo \'{"Version": 1, "AccessKeyId": "A"}\'',
        'echo \'{"Version": 1, "AccessKeyId": "A", "SecretAccessKey": "s", "SessionToken": "t", "Expiration": "soon"}\'',
    ],
)
def test_a_program_that_gives_no_credentials(mx: Mx, text: str) -> None:
    refused(fetched(mx, {}, program(mx, text)))


HANGING = """
(sleep {mark} & sleep {mark}; wait) &
trap '' TERM INT HUP
echo > {fifo}
sleep {mark}
"""


def hanging(mx: Mx) -> tuple[str, Path, str]:
    """A program of several processes that end by nothing but SIGKILL; a FIFO that tells of its begin; what is in their names."""
    fifo, mark = mx.home / "begun", f"6{os.getpid()}.{time.time_ns() % 10**9}"
    os.mkfifo(fifo)
    return HANGING.format(mark=mark, fifo=fifo), fifo, mark


def running(mark: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if mark.encode() in (line := path.read_bytes()):
                found.append(line.decode())
    return found


def ended(mark: str) -> bool:
    """Whether nothing of it is left, or soon will not be: a killed process takes a moment to go."""
    deadline = time.monotonic() + 5
    while running(mark) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not running(mark)


def begun(fifo: Path, run: Running) -> None:
    with open(os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)) as news:
        deadline = time.monotonic() + 20
        while not news.read():
            assert run.process.poll() is None, run.stderr
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.mark.parametrize(
    ("signums", "code"),
    [
        ([signal.SIGTERM], 143),
        ([signal.SIGINT], 130),
        ([signal.SIGHUP], 129),
        ([signal.SIGINT, signal.SIGINT], 130),
        ([], 124),
    ],
)
def test_a_program_that_hangs_ends_with_the_command(mx: Mx, signums: list[signal.Signals], code: int) -> None:
    text, fifo, mark = hanging(mx)
    (mx.home / ".aws").mkdir()
    (mx.home / ".aws" / "config").write_text(program(mx, text))
    limit = () if signums else ("--timeout", "3s")
    run = mx.start("prefetch", "s3://b/m", *limit, env={"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:1"})
    begun(fifo, run)
    assert len(running(mark)) >= 3
    for signum in signums:
        run.send(signum)
    assert run.wait(10).code == code
    assert ended(mark)


def test_a_program_of_another_profile_and_one_for_google(mx: Mx, tmp_path: Path) -> None:
    text, fifo, mark = hanging(mx)
    (mx.home / ".aws").mkdir()
    role = "[default]\nrole_arn = arn:aws:iam::1:role/r\nsource_profile = base\n"
    (mx.home / ".aws" / "config").write_text(role + program(mx, text).replace("[default]", "[profile base]"))
    run = mx.start("prefetch", "s3://b/m", env={"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:1"})
    begun(fifo, run)
    run.send(signal.SIGTERM)
    run.wait(10).exits(143)
    assert ended(mark)
    source = {
        "type": "external_account",
        "audience": "//iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/p/providers/q",
        "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
        "token_url": "http://127.0.0.1:1/token",
        "credential_source": {"executable": {"command": str(mx.home / "credentials.sh"), "timeout_millis": 60000}},
    }
    (tmp_path / "google.json").write_text(json.dumps(source))
    env = {
        "GOOGLE_APPLICATION_CREDENTIALS": tmp_path / "google.json",
        "GOOGLE_EXTERNAL_ACCOUNT_ALLOW_EXECUTABLES": "1",
    }
    run = mx.start("prefetch", "gs://b/m", env=env)
    begun(fifo, run)
    run.send(signal.SIGTERM)
    run.wait(10).exits(143)
    assert ended(mark)


@capability("torch")
def test_a_program_ends_with_the_call_from_python(mx: Mx) -> None:
    """No signal handler of ours, and the process goes on."""
    text, fifo, mark = hanging(mx)
    (mx.home / ".aws").mkdir()
    (mx.home / ".aws" / "config").write_text(program(mx, text))
    script = (
        "import mx_cli\ntry:\n    mx_cli.load('s3://b/m')\nexcept KeyboardInterrupt:\n    print('left', flush=True)"
        "\n    input()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        env=clean_env(mx.home, mx.cache, {"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:1"}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    run = Running(("python",), process, time.monotonic())
    begun(fifo, run)
    run.send(signal.SIGINT)
    run.wait_out("left")
    assert ended(mark)
    process.kill()
    run.wait()


def test_a_code_is_not_asked_for_without_a_terminal(mx: Mx) -> None:
    config = (
        "[default]\nrole_arn = arn:aws:iam::1:role/r\nsource_profile = base\nmfa_serial = arn:aws:iam::1:mfa/u\n"
        "[profile base]\naws_access_key_id = AKIABASE\naws_secret_access_key = s\n"
    )
    refused(fetched(mx, {}, config), "no terminal")


# --- services ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "body"),
    [(200, b"<html>"), (200, b'{"AccessKeyId": "A"}'), (200, b"[1]"), (404, b"{}"), (500, b"oops")],
)
def test_a_container_service_that_gives_no_credentials(mx: Mx, status: int, body: bytes) -> None:
    with scripted(lambda asked: asked.say(status, body)) as service:
        refused(fetched(mx, {"AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{service.url}/creds"}))


@pytest.mark.parametrize(
    "env",
    [
        {"AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://example.com/creds"},
        {
            "AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://127.0.0.1:1/creds",
            "AWS_CONTAINER_AUTHORIZATION_TOKEN": f"{SECRET}\nb",
        },
    ],
)
def test_a_container_service_that_is_none(mx: Mx, env: dict[str, str]) -> None:
    refused(fetched(mx, env))


def test_a_container_service_that_gives_credentials(mx: Mx) -> None:
    keys: list[str] = []
    with scripted(lambda asked: asked.say(200, json.dumps(GOOD).encode())) as service:
        fetched(mx, {"AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{service.url}/creds"}, keys=keys).ok()
    assert keys == ["AKIAGOOD"]


def posted(*answers: tuple[int, bytes], tls: Tls | None = None) -> contextlib.AbstractContextManager[Scripted]:
    """A token service: each answer once, then the last one."""
    return scripted(lambda asked: asked.say(*answers[min(asked.number, len(answers)) - 1]), tls)


ASSUMED = b"""<AssumeRoleWithWebIdentityResponse><AssumeRoleWithWebIdentityResult><Credentials>
<AccessKeyId>ASIAWEB</AccessKeyId><SecretAccessKey>s</SecretAccessKey><SessionToken>t</SessionToken>
<Expiration>2099-01-01T00:00:00Z</Expiration></Credentials></AssumeRoleWithWebIdentityResult>
</AssumeRoleWithWebIdentityResponse>"""


def sts_error(code: str) -> bytes:
    return f"<ErrorResponse><Error><Code>{code}</Code><Message>because</Message></Error></ErrorResponse>".encode()


@pytest.fixture
def web_identity(mx: Mx) -> Callable[..., Result]:
    """web_identity(service.url of the token service, keys) -> how a prefetch with a pod's own identity ended."""
    token = mx.home / "token"
    token.write_text("a.web.identity.token")

    def run(url: str, keys: list[str] | None = None, **env: str) -> Result:
        identity = {"AWS_WEB_IDENTITY_TOKEN_FILE": str(token), "AWS_ROLE_ARN": "arn:aws:iam::123456789012:role/r"}
        return fetched(mx, identity | {"AWS_ENDPOINT_URL_STS": url} | env, keys=keys)

    return run


@pytest.mark.parametrize(
    ("status", "code", "exit_code", "asked"),
    [
        (400, "ExpiredTokenException", 11, 1),
        (403, "AccessDenied", 11, 1),
        (400, "Throttling", 12, 2),
        (500, "x", 12, 2),
    ],
)
def test_a_token_service_that_refuses(
    web_identity: Callable[..., Result], status: int, code: str, exit_code: int, asked: int
) -> None:
    """A no is asked for once; what may pass is asked for again, by one policy, and told to be retryable."""
    with posted((status, sts_error(code))) as service:
        refused(web_identity(service.url), code, code=exit_code)
    assert len(service.asked) >= asked
    assert asked > 1 or len(service.asked) == 1


def test_a_token_service_that_is_not_there(web_identity: Callable[..., Result]) -> None:
    refused(web_identity("http://127.0.0.1:1"), code=12)


def test_a_token_service_that_was_busy(web_identity: Callable[..., Result]) -> None:
    keys: list[str] = []
    with posted((400, sts_error("Throttling")), (503, b"oops"), (200, ASSUMED)) as service:
        web_identity(service.url, keys, MX_RETRY_FOR="10s").ok()
    assert keys == ["ASIAWEB"]
    assert len(service.asked) == 3


def test_p18_a_token_service_behind_the_same_ca(web_identity: Callable[..., Result], tls: Tls) -> None:
    with posted((200, ASSUMED), tls=tls) as service:
        web_identity(service.url, MX_CA_BUNDLE=str(tls.ca)).ok()


# --- Google ------------------------------------------------------------------------------------------------------


@pytest.fixture
def account(tmp_path: Path) -> Callable[..., Path]:
    """account(token_uri) -> the key file of a service account."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )

    def make(token_uri: str, **changes: Any) -> Path:
        path = tmp_path / "account.json"
        fields = {
            "type": "service_account",
            "client_email": "x@y.iam.gserviceaccount.com",
            "private_key": pem.decode(),
            "token_uri": token_uri,
        }
        path.write_text(json.dumps(fields | changes))
        return path

    return make


def from_google(mx: Mx, tls: Tls, env: Mapping[str, str]) -> Result:
    """A prefetch from a store of Google's that is reached over TLS, with credentials."""
    with scripted(GoogleBucket(OBJECTS)) as plain, relayed(plain.url, tls) as url:
        return mx("prefetch", f"gs+{url}/b/m", env={"MX_RETRY_FOR": "1s", **env})


@contextlib.contextmanager
def relayed(url: str, tls: Tls) -> Iterator[str]:
    """The same server over TLS."""

    def answer(asked: Asked) -> None:
        own = {name: asked.headers[name] for name in ("Range", "Authorization") if asked.headers.get(name)}
        status, headers, body = request(asked.method, url + asked.path, None, own)
        kept = {name: value for name, value in headers.items() if name not in ("server", "date", "connection")}
        asked.say(status, body, kept)

    with scripted(answer, tls) as server:
        yield server.url


@pytest.mark.parametrize("text", ["[]", '"x"', "{", '{"type": "service_account"}', '{"type": ["x"]}', "\xff"])
def test_a_key_file_that_is_none(mx: Mx, tmp_path: Path, text: str) -> None:
    path = tmp_path / "account.json"
    path.write_text(text, "latin-1")
    result = mx("prefetch", "gs://b/m", env={"GOOGLE_APPLICATION_CREDENTIALS": path}).exits(11)
    assert "Traceback" not in result.err
    assert "no usable Google credentials" in result.err


def test_p18_googles_token_service_behind_the_same_ca(mx: Mx, tls: Tls, account: Callable[..., Path]) -> None:
    token = json.dumps({"access_token": "ya29.TOKEN", "expires_in": 3600, "token_type": "Bearer"}).encode()
    with posted((200, token), tls=tls) as service:
        env = {"GOOGLE_APPLICATION_CREDENTIALS": str(account(service.url)), "MX_CA_BUNDLE": str(tls.ca)}
        from_google(mx, tls, env).ok()
    assert len(service.asked) == 1
    assert published(mx.cache) == cachecheck.sums({"model.safetensors": WEIGHTS})


@pytest.mark.parametrize(("status", "body", "code"), [(400, b'{"error": "invalid_grant"}', 11), (503, b"{}", 12)])
def test_a_token_service_of_google_that_refuses(
    mx: Mx, account: Callable[..., Path], status: int, body: bytes, code: int
) -> None:
    with posted((status, body)) as service:
        result = mx(
            "prefetch", "gs://b/m", env={"GOOGLE_APPLICATION_CREDENTIALS": account(service.url), "MX_RETRY_FOR": "1s"}
        ).exits(code)
    assert "token service" in result.err
