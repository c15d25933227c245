"""Trainers over two hosts that update a stock SGLang server over two others, with no variable set for the network.

The digest of every live tensor is that of a stock load of the trainer's checkpoint, tokens are transformers'.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from support.hosts import laboratory, why_not
from support.nixl_env import needs_nixl
from support.places import Places, servers_on, trainers_on, url_of
from support.tiny_qwen3 import tiny_qwen3
from tools.oracle.stock import stock_digests

pytestmark = [
    pytest.mark.engine,
    pytest.mark.sweep,
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]
CONFIG = tiny_qwen3()
_DEADLINE_S = 400


@pytest.mark.parametrize(
    ("trainer_hosts", "per_host", "sharding", "engine_hosts", "tp_size", "asked", "transport"),
    [
        ("ab", 2, "fsdp", "cd", 4, "auto", "p2p"),
        ("ab", 2, "fsdp_tp", "cd", 2, "auto", "p2p"),
        ("ab", 1, "fsdp", "bc", 2, "auto", "ipc+p2p"),
        pytest.param("ab", 2, "fsdp", "cd", 4, "nixl", "nixl", marks=needs_nixl),
    ],
    ids=["apart", "apart, FSDP over hosts of TP=2", "one host has both", "apart, read by NIXL"],
)
def test_a_server_over_two_hosts_follows_trainers_over_two(
    trainer_hosts: str,
    per_host: int,
    sharding: str,
    engine_hosts: str,
    tp_size: int,
    asked: str,
    transport: str,
    tmp_path: Path,
) -> None:
    CONFIG.save_pretrained(tmp_path / "model")
    deadline = time.monotonic() + _DEADLINE_S
    places = Places(tmp_path)
    with laboratory(len({*trainer_hosts, *engine_hosts}), names_lead_to_loopback=False) as hosts:
        by_letter = dict(zip("abcd", hosts, strict=False))
        engine = [by_letter[letter] for letter in engine_hosts]
        servers = servers_on(places, engine, tmp_path, tp_size)
        url = url_of(engine[0])
        places.await_health(hosts[0], url, servers, deadline)
        trainers = [by_letter[letter] for letter in trainer_hosts]
        order = str(tmp_path), str(tp_size), url, asked, sharding
        places.await_end(trainers_on(places, trainers, per_host, *order), deadline)
    seen = assert_arrived(tmp_path, transport)
    checkpoints = [tmp_path / version for version in ("1", "2")]
    expected = stock_digests(checkpoints[0], checkpoints, tp_size=tp_size, dtype="float32")
    assert [dict(enumerate(version["digests"])) for version in seen] == expected


def test_an_engine_that_the_trainer_starts_on_all_its_hosts_follows_it(tmp_path: Path) -> None:
    CONFIG.save_pretrained(tmp_path / "model")
    deadline = time.monotonic() + _DEADLINE_S
    places = Places(tmp_path)
    with laboratory(2, names_lead_to_loopback=False) as hosts:
        places.await_end(trainers_on(places, hosts, 2, str(tmp_path), "2", "embedded", "auto", "fsdp"), deadline)
    assert_arrived(tmp_path, "ipc+p2p")


def assert_arrived(folder: Path, transport: str) -> list[dict[str, Any]]:
    """Everything that the trainer has seen of two updates; by which way they went."""
    seen = json.loads((folder / "seen.json").read_text())
    assert [version["tokens"] for version in seen] == [version["expected"] for version in seen]
    assert seen[0]["tokens"] != seen[1]["tokens"]
    for version in seen:
        report = version["report"]
        assert report["transport"] == transport
        for rank in report["engine_ranks"]:
            read_with_gaps = transport == "nixl" and rank["received_bytes"] > rank["least_bytes"]
            assert rank["received_bytes"] == rank["least_bytes"] > 0 or read_with_gaps
    return seen


@needs_nixl
def test_two_servers_on_two_hosts_read_from_each_other(tmp_path: Path) -> None:
    CONFIG.save_pretrained(tmp_path / "model")
    deadline = time.monotonic() + _DEADLINE_S
    places, tp_sizes = Places(tmp_path), (1, 2)
    with laboratory(3, names_lead_to_loopback=False) as (trainer, *engines):
        servers = [
            server
            for host, tp in zip(engines, tp_sizes, strict=True)
            for server in servers_on(places, [host], tmp_path, tp)
        ]
        urls = [url_of(host) for host in engines]
        for url in urls:
            places.await_health(trainer, url, servers, deadline)
        sizes = ",".join(map(str, tp_sizes))
        order = str(tmp_path), sizes, ",".join(urls), "nixl", "fsdp"
        places.await_end(trainers_on(places, [trainer], 2, *order), deadline)
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert [version["tokens"] for version in seen] == [version["expected"] for version in seen]
    for version in seen:
        for report in version["report"].values():
            assert sum(rank["relayed_bytes"] for rank in report["engine_ranks"]) > 0
            assert report["message"] == ""
    checkpoints = [tmp_path / version for version in ("1", "2")]
    for number, tp_size in enumerate(tp_sizes):
        expected = stock_digests(checkpoints[0], checkpoints, tp_size=tp_size, dtype="float32")
        assert [dict(enumerate(version["digests"][number])) for version in seen] == expected
