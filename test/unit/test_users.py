"""Trainer and engine of different people on one host: what the one may not read, the other sends."""

import contextlib
import encodings.idna  # noqa: F401  # looked up by sockets, by a user who may not read Python's files
import os

import pytest
import torch

from sglang_reshard.memory.mapping import host_identity
from support.refusals import refusal_of
from support.toy_serving import serve
from support.toy_trainers import State
from support.world import run_world

NOBODY = 65534


def train(trainer, transport):
    state = State((2,), "fsdp", torch.float32)
    state.become(1)
    sender = trainer.sender(transport=transport)
    with contextlib.closing(sender):
        return (
            sender.update(state.given).transport
            if transport == "auto"
            else refusal_of(lambda: sender.update(state.given))[1]
        )


def serve_as_nobody(rank, size, requests, _transport):
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    return serve(rank, size, requests)


def test_another_user_is_another_host(monkeypatch):
    own = host_identity()
    monkeypatch.setattr(os, "geteuid", lambda: NOBODY - 1)
    assert host_identity() != own


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_an_engine_of_another_user_is_sent_what_it_may_not_read():
    ways, versions = run_world(2, 2, train, serve_as_nobody, "auto")
    assert ways == ["p2p", "p2p"]
    assert versions == [[1], [1]]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_reading_cannot_be_asked_for_then():
    says, _ = run_world(2, 2, train, serve_as_nobody, "ipc")
    assert all("memory on the same host only, as the same user" in said for said in says), says
