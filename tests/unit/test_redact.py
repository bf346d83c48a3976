"""P-37: what is taken for a secret, and what is not."""

from __future__ import annotations

import pytest

from mx_cli.base import redact
from mx_cli.base.errors import NotFound


@pytest.mark.parametrize(
    "text",
    [
        "token hf_abcdEFGH1234",
        "Authorization: Bearer SECRET",
        "http://u:SECRET@host/path",
        "https://host/path?X-Amz-Signature=SECRET&x=1",
        "/relative?sig=SECRET",
        "?X-Goog-Credential=SECRET",
        "X-Amz-Security-Token=SECRET",
        "access_token=SECRET",
        "HF_TOKEN=SECRET",
        "AWS_SECRET_ACCESS_KEY: AKIAABCDEFGHIJKLMNOP",
        "apikey=SECRET",
        "s3://key:SECRET@bucket/x",
        "https://u:with/SECRET@host:1/x",
        "https://u:with?SECRET@host/x",
        "not a URL: https://u:with#and/SECRET@host/x",
        "https://u:with@SECRET@host/x",
        "s3://AKIAABCDEFGHIJKLMNOP:with/SECRET@bucket/x",
        "http://u:SECRET@[::1]:80/x?sig=SECRET",
        "u:SECRET@host/x: no such path",
        "ya29.SECRET",
    ],
)
def test_p37_secrets_go(text: str) -> None:
    cleaned = redact.text(text)
    assert "SECRET" not in cleaned.replace("AWS_SECRET_ACCESS_KEY", "")
    assert "abcdEFGH" not in cleaned
    assert "AKIAABCDEFGHIJKLMNOP" not in cleaned
    assert redact.text(cleaned) == cleaned


@pytest.mark.parametrize(
    "text",
    [
        "set HF_TOKEN or --hf-token-file",
        "secrets do not belong into this file: hf_token",
        "hf_token_file hf_home hf_endpoint hf_hub_cache",
        "http://host:80/f/sign=1,slow=2/x",
        "seed=42 base=3 response=200 sent=5 tokens=7 use=1",
        "s3://bucket/a?b#c",
        "s3://arn:aws:s3:us-west-2:123456789012:accesspoint/key",
        "hf://org/name@main: 3 files; hf://a/b@c",
        "/data/x:y/z@1: no such file",
        "http://[::1]:80/x: cannot connect",
        "s3+http://[fe80::1]:9000/bucket/key",
        "at 12:30:15 worker@host",
        "model-00001-of-00002.safetensors: wrong size (expected 5, observed 4)",
    ],
)
def test_p37_everything_else_stays(text: str) -> None:
    assert redact.text(text) == text


def test_an_error_leaves_the_process_without_secrets() -> None:
    found = NotFound("no https://h/x?token=abc", hint="try https://user:pass@h/y?sig=abc").to_json()
    assert found["message"] == "no https://h/x"
    assert found["hint"] == "try https://h/y"
