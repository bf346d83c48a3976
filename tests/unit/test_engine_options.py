"""What an engine's operator may write for mx, and what it means for each of its ranks."""

from __future__ import annotations

from typing import Any

import pytest

from mx_cli.base.errors import UsageError
from mx_cli.engines.options import ROUTES, options_of


def test_nothing_is_needed() -> None:
    options = options_of({})
    assert (options.uri, options.stage, options.serve, options.routes) == ("", "loaded", False, ROUTES)


def test_settings_and_own_keys_are_told_apart() -> None:
    options = options_of(
        {"uri": "s3://b/m", "peer_token_file": "/run/secret", "discovery": "dir:/x", "wait": 30, "offline": False}
    )
    assert options.uri == "s3://b/m"
    assert options.settings == {
        "peer_token_file": "/run/secret",
        "discovery": "dir:/x",
        "wait": 30,
        "offline": False,
    }


@pytest.mark.parametrize("key", ["urI", "token", "settings", "hf_token", 7])
def test_an_unknown_key_is_refused_and_the_known_ones_are_named(key: Any) -> None:
    with pytest.raises(UsageError) as refused:
        options_of({key: "x"})
    assert str(key) in refused.value.what
    assert "uri" in refused.value.hint
    assert "mx config" in refused.value.hint


@pytest.mark.parametrize(
    "given",
    [
        {"serve": "yes"},
        {"serve": 1},
        {"max_readers": True},
        {"max_readers": 0},
        {"uri": None},
        {"uri": 3},
        {"stage": "processing"},
        {"routes": []},
        {"routes": ["peer", "origin"]},
        {"routes": "peer,,cache"},
        {"routes": {"peer": 1}},
        {"peers": ["host-without-a-port"]},
        {"peers": [17]},
        {"listen": "0.0.0.0"},
        {"advertise": "fd00::5"},
        {"path": "rdma"},
        {"path": "nixl-read", "require": ["encrypted"]},
        ["uri"],
        None,
    ],
)
def test_a_wrong_value_is_refused(given: Any) -> None:
    with pytest.raises(UsageError):
        options_of(given)


def test_a_list_may_be_a_text() -> None:
    assert options_of({"routes": "cache, engine"}).routes == ("cache", "engine")
    assert options_of({"peers": "a:1,[::1]:2"}).peers == ("a:1", "[::1]:2")


def test_each_rank_has_the_next_port() -> None:
    options = options_of(
        {
            "listen": "0.0.0.0:7600",
            "advertise": "10.0.0.1:7600",
            "peers": ["[fd00::1]:7600"],
            "discovery": "dns:replicas.prod:7600",
            "name": "llama",
        }
    )
    assert options.of_rank(0) == options
    rank = options.of_rank(3)
    assert (rank.listen, rank.advertise, rank.peers) == ("0.0.0.0:7603", "10.0.0.1:7603", ("[fd00::1]:7603",))
    assert (rank.settings["discovery"], rank.name) == ("dns:replicas.prod:7603", "llama-3")
    assert options_of({"discovery": "static:a:1,b:2"}).of_rank(1).settings["discovery"] == "static:a:2,b:3"


def test_free_ports_and_shared_directories_are_the_same_for_all_ranks() -> None:
    options = options_of({"listen": "127.0.0.1:0", "advertise": "10.0.0.1", "discovery": "dir:/mnt/peers"})
    rank = options.of_rank(5)
    assert (rank.listen, rank.advertise, rank.settings) == ("127.0.0.1:0", "10.0.0.1", {"discovery": "dir:/mnt/peers"})


@pytest.mark.parametrize("address", ["[fd00::5]", "node-7.example", "[fd00::5]:0"])
def test_an_address_without_a_port_is_the_same_for_all_ranks(address: str) -> None:
    assert options_of({"advertise": address}).of_rank(1).advertise == address


def test_files_are_served_once_a_host_at_one_port() -> None:
    options = options_of({"stage": "checkpoint", "listen": "0.0.0.0:7600", "discovery": "dns:replicas:7600"})
    assert options.of_rank(3) == options


def test_there_may_be_no_port_left() -> None:
    with pytest.raises(UsageError, match="no port is left for rank 8"):
        options_of({"listen": "0.0.0.0:65530"}).of_rank(8)
