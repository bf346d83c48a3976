"""Where a bucket is asked for: AWS's hosts by region, or another store's, with the bucket in the host or in the path."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote, unquote_to_bytes, urlsplit, urlunsplit

from mx_cli.sources import aws_config
from mx_cli.sources.answers import Place, same_place
from mx_cli.sources.sigv4 import KEY_SAFE

_AWS_STORE = re.compile(r"https://s3(-fips)?[.-]([a-z0-9-]+\.)*amazonaws\.com(\.cn)?")
_PLAIN_BUCKET = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")


class Endpoint:
    """The URLs of one bucket. `endpoint`: another store's address, empty for AWS."""

    def __init__(self, bucket: str, endpoint: str, environ: Mapping[str, str], home: Path | None) -> None:
        self._bucket, self._endpoint = bucket, endpoint
        self._style = aws_config.addressing_style(environ, home)
        self._service = "s3-fips" if aws_config.use_of("fips", environ, home) else "s3"
        if aws_config.use_of("dualstack", environ, home):
            self._service += ".dualstack"

    def server(self, region: str) -> str:
        """The bucket's URL without a slash at its end."""
        if self._endpoint:
            return self._elsewhere()
        domain = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
        # A dot in the name would not match the certificate of a virtual host.
        if self._style != "path" and _PLAIN_BUCKET.fullmatch(self._bucket):
            return f"https://{self._bucket}.{self._service}.{region}.{domain}"
        return f"https://{self._service}.{region}.{domain}/{self._bucket}"

    def follow(self, asked: str, moved: str, region: str) -> Place | None:
        """Where a redirect leads: signed anew within the store, to others without anything of ours.

        None where it leads from an encrypted connection to one that is not.
        """
        parts = urlsplit(moved)
        if self._is_same_store(self.server(region), moved):
            # As it is signed: a server may write the same path in other ways.
            return Place(urlunsplit(parts._replace(path=quote(unquote_to_bytes(parts.path), safe=KEY_SAFE))), True)
        return None if parts.scheme == "http" and asked.startswith("https:") else Place(moved, False)

    def _is_same_store(self, server: str, moved: str) -> bool:
        """Whether both are names of one store, with the bucket in the host or not."""
        if same_place(self._without_bucket(server), self._without_bucket(moved)):
            return True
        return all(_AWS_STORE.fullmatch(self._without_bucket(url)) for url in (server, moved))

    def _without_bucket(self, url: str) -> str:
        parts = urlsplit(url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2].removeprefix(f'{self._bucket}.')}"

    def _elsewhere(self) -> str:
        parts = urlsplit(self._endpoint)
        if self._style == "virtual" and not _is_address(parts.hostname or ""):
            return f"{parts.scheme}://{self._bucket}.{parts.netloc}{parts.path}"
        return f"{self._endpoint}/{self._bucket}"


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
