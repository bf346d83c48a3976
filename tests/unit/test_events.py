"""What a line of progress says."""

from __future__ import annotations

import pytest

from mx_cli.base.events import Progress


@pytest.mark.parametrize(
    ("progress", "line"),
    [
        (Progress("transfer", 0, 2048, 0.0), "transfer    0 %  0 B of 2.0 KiB  0 B/s"),
        (Progress("transfer", 1024, 2048, 512.0), "transfer   50 %  1.0 KiB of 2.0 KiB  512 B/s  2.0 s left"),
        (Progress("publish", 2048, 2048, 0.0, 3, 3), "publish  100 %  2.0 KiB of 2.0 KiB  3/3 files"),
        (Progress("follow", 0, 2048, 0.0, leader="a/1"), "following a/1    0 %  0 B of 2.0 KiB"),
    ],
    ids=lambda value: value.phase if isinstance(value, Progress) else "",
)
def test_a_rate_stands_where_bytes_should_move(progress: Progress, line: str) -> None:
    assert progress.text() == line
