"""UCX's log: the path of reads, the reason of an error."""

from __future__ import annotations

import os

import pytest

from mx_cli.transport.nixl_log import Log, is_rdma, path_of_reads, reason

NEW = """\
+--------+-------------+-----------------------------------+
| peer-1 self cfg#0                                        |
| remote memory read by ucp_get* into host memory from host|
+--------+-------------+-----------------------------------+
| 0..inf | zero-copy   | cma/memory                        |
+--------+-------------+-----------------------------------+
| peer-1 inter-node cfg#1                                  |
| active message by ucp_am_send* from host memory          |
|      0 | short       | tcp/eth0                          |
| 1..inf | zero-copy   | tcp/eth0                          |
+--------+-------------+-----------------------------------+
| peer-1 inter-node cfg#1                                  |
| remote memory read by ucp_get*(multi) into host memory from host |
+--------+-------------+-----------------------------------+
| Range  | Description |              Config               |
|      0..2047 | software emulation | tcp/eth0             |
|     2K..16K  | copy-out    | rc_mlx5/mlx5_0:1            |
| 16385..inf   | zero-copy   | 50% on rc_mlx5/mlx5_0:1 and 50% on rc_mlx5/mlx5_1:1 |
"""
OLD = """\
+--------------------------------+------------------------------------------------------------------+
| ucp_context_1 self cfg#0       | remote memory read by ucp_get* into host memory from host        |
+--------------------------------+-------------------------------------------------------+----------+
|                         0..inf | zero-copy                                             | cma/mem  |
+--------------------------------+------------------------------------------------------------------+
| ucp_context_1 intra-node cfg#1 | remote memory read by ucp_get*(multi) into host memory from host |
+--------------------------------+-------------------------------------------------------+----------+
|                         0..inf | software emulation                                    | tcp/eth0 |
"""


@pytest.mark.parametrize(
    ("text", "size", "path"),
    [
        (NEW, 4 << 20, "50% on rc_mlx5/mlx5_0:1 and 50% on rc_mlx5/mlx5_1:1"),
        (NEW, 16384, "rc_mlx5/mlx5_0:1 (copy-out)"),
        (NEW, 100, "tcp/eth0 (software emulation)"),
        (NEW.partition("| active")[0], 100, ""),
        (OLD, 4 << 20, "tcp/eth0 (software emulation)"),
        ("", 1, ""),
    ],
)
def test_the_path_is_that_of_the_newest_table_of_reads_from_a_peer(text: str, size: int, path: str) -> None:
    assert path_of_reads(text, size) == path


def test_the_log_is_read_from_where_the_caller_was_without_its_prefixes() -> None:
    log = Log()
    path = log.variables()["UCX_LOG_FILE"]
    line = "[1796098739.924907] [host:7:0]   ucp_ep.c:12  UCX  ERROR  no path to peer\n"
    with open(path, "w") as file:
        file.write(line)
    size = log.size
    assert size == len(line)
    with open(path, "a") as file:
        file.write("[1.2] [host:7:0]   | table |\n")
    assert log.since(size) == "| table |\n"
    assert reason(log.since(0)) == "no path to peer"
    assert reason(log.since(size)) == ""
    assert not os.get_inheritable(int(path.rpartition("/")[2]))


@pytest.mark.parametrize(
    ("path", "rdma"),
    [
        ("rc_mlx5/mlx5_0:1", True),
        ("50% on rc_mlx5/mlx5_0:1 and 50% on dc_mlx5/mlx5_1:1", True),
        ("50% on rc_mlx5/mlx5_0:1 and 50% on tcp/eth0", False),
        ("tcp/eth0 (software emulation)", False),
        ("cma/memory", False),
        ("cuda_ipc/cuda", False),
        ("", False),
    ],
)
def test_rdma_is_told_from_the_rest(path: str, rdma: bool) -> None:
    assert is_rdma(path) is rdma
