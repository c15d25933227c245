"""Trainer ranks reach a server together: what the first of them finds out, all are told."""

import os

import pytest
import torch.distributed as dist

from sglang_reshard.api.remote_engine import URL
from sglang_reshard.api.weight_sender import WeightSender
from sglang_reshard.errors import Unsupported
from sglang_reshard.trainer import collectives
from support.refusals import refusal_of
from support.world import run_world


def reach(trainer, url):
    os.environ.pop(URL, None)
    return refusal_of(lambda: WeightSender(url, trainer.group, timeout_s=5))


def open_on(trainer, interface):
    return refusal_of(lambda: trainer.sender(interface=interface))


def idle(rank, size, requests, *_):
    return list(requests)


@pytest.mark.parametrize(
    ("url", "kind", "says"),
    [
        ("http://127.0.0.1:1", "EngineUnreachable", "http://127.0.0.1:1 did not answer: ConnectError"),
        ("gpu7:30000", "Unsupported", "pass http://host:port"),
        (None, "Unsupported", f"or set {URL}"),
    ],
)
def test_every_rank_is_told_why_there_is_no_server(url, kind, says):
    told, _ = run_world(3, 1, reach, idle, url)
    assert [error for error, _ in told] == [kind] * 3
    assert all(says in words for _, words in told)


@pytest.mark.parametrize(
    ("interface", "says"),
    [("192.0.2.1", "is not an address of trainer rank 0's host"), ("0.0.0.0", "means all interfaces")],
)
def test_every_rank_is_told_that_an_interface_is_none(interface, says):
    told, _ = run_world(2, 1, open_on, idle, interface)
    assert all(kind == "Unsupported" and f"interface='{interface}' {says}" in words for kind, words in told)


def test_a_group_that_cannot_carry_metadata_is_told_so(monkeypatch):
    """torch would say that there is no backend for the CPU, at the first message, on some ranks."""
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
    with pytest.raises(Unsupported, match="cpu:gloo,cuda:nccl"):
        collectives.require_cpu_backend(object())
