"""Whole updates in real processes on gloo: DTensor shards in, bit-exact engine parameters out."""

import pytest
import torch

from sglang_reshard.errors import EngineRefused, Mismatch, Unsupported
from support.nixl_env import needs_nixl, use_nixl
from support.refusals import refusal_of
from support.sweep import only
from support.toy import ToyRank, checkpoint
from support.toy_serving import answered, receiver_of, serve, version_of
from support.toy_trainers import PAIRS, State, assert_told_alike
from support.world import run_world


def train(trainer, mesh_shape, kind, transport, _live_dtype=None):
    if transport == "nixl":
        use_nixl()
    sender = trainer.sender(transport=transport)
    state = State(mesh_shape, kind, torch.float32)
    reports = []
    for version, options in enumerate(({}, {"verify": "full"}, {"verify": "sample", "staged": True}), start=1):
        state.become(version)
        reports.append(sender.update(state.given, weight_version=str(version), **options))
    return reports


def serve_in_place(rank, size, requests, _mesh_shape, _kind, transport, live_dtype=torch.float32):
    if transport == "nixl":
        use_nixl()
    model = ToyRank(rank, size, live_dtype)
    addresses = {n: p.data_ptr() for n, p in model.named_parameters()}
    versions = [version_of(model) for _ in answered(receiver_of(model), requests)]
    assert addresses == {n: p.data_ptr() for n, p in model.named_parameters()}
    return versions


def run(mesh_shape, engines, *arguments):
    reports, versions = run_world(mesh_shape.numel(), engines, train, serve_in_place, mesh_shape, *arguments)
    assert versions == [[1, 2, 3]] * engines
    assert_told_alike(reports)
    told = [(report.verified, len(report.digest), "verify" in report.seconds) for report in reports[0]]
    assert told == [("off", 0, False), ("full", 16, True), ("sample", 0, True)]
    assert [any(rank.staged_bytes for rank in report.engine_ranks) for report in reports[0]] == [False, False, True]
    return reports[0]


NIXL = pytest.param("nixl", marks=needs_nixl)
FEW = [((3,), 4, "fsdp"), ((2, 2), 4, "fsdp_tp")]


@pytest.mark.parametrize(("mesh_shape", "engines", "kind"), PAIRS)
def test_every_parameter_is_bit_exact_after_each_update(mesh_shape, engines, kind):
    run(torch.Size(mesh_shape), engines, kind, "broadcast")


@pytest.mark.parametrize("transport", ["ipc", "p2p", NIXL])
@pytest.mark.parametrize(("mesh_shape", "engines", "kind"), only(PAIRS, FEW.__contains__))
def test_exact_transports_move_exactly_what_is_lacking(mesh_shape, engines, kind, transport):
    for report in run(torch.Size(mesh_shape), engines, kind, transport):
        assert report.transport == transport
        assert report.transport_reason == "requested"
        for rank in report.engine_ranks:
            assert rank.received_bytes >= rank.least_bytes
            assert rank.received_bytes == rank.least_bytes or transport == "nixl", "only NIXL reads gaps as well"
        assert sum(t.sent_bytes for t in report.trainer_ranks) == sum(r.least_bytes for r in report.engine_ranks)


@pytest.mark.parametrize("transport", ["ipc", "p2p"])
def test_weights_are_cast_where_they_arrive(transport):
    run(torch.Size((2,)), 4, "tp", transport, torch.bfloat16)


def train_with_names_that_are_not_read(trainer):
    sender = trainer.sender()
    state = checkpoint(1)
    head, ignored = ("lm_head.weight", state["embed.weight"].detach()), ("rotary.inv_freq", torch.ones(3))
    messages = [
        sender.update([*state.items(), ignored], ignore=["rotary.*"]).message,
        sender.update([*state.items(), head]).message,
    ]
    refused = refusal_of(lambda: sender.update([*state.items(), ("lm_head.bias", torch.zeros(3))]))
    return messages, refused


def test_names_to_ignore_and_a_tied_head_are_told_and_another_unread_name_is_refused():
    told, versions = run_world(1, 2, train_with_names_that_are_not_read, serve)
    messages, refused = told[0]
    assert messages == ["ignored: rotary.inv_freq", "the engine does not read lm_head.weight"]
    assert "ignore=['lm_head.bias']" in refused[1]
    assert versions == [[1, 1, 1]] * 2


# -- mistakes: refused on every trainer rank, nothing written


def train_mistaken(trainer, mistake):
    sender = trainer.sender(timeout_s=2 if mistake == "absent" else 5)
    state = checkpoint(1)
    if mistake == "order" and trainer.rank == 1:
        state = dict(reversed(state.items()))
    if mistake == "missing":
        del state["down.weight"]
    if mistake == "unknown":
        state["rotary.inv_freq"] = torch.zeros(3)
    if mistake == "shape":
        state["norm.weight"] = torch.zeros(5)
    if mistake == "meta" and trainer.rank == 1:
        state["norm.weight"] = torch.zeros(16, device="meta")
    told = None if mistake == "absent" and trainer.rank == 1 else refusal_of(lambda: sender.update(state.items()))
    return told


@pytest.mark.parametrize(
    ("mistake", "kind", "says"),
    [
        ("order", Mismatch, ["trainer rank 1", "embed.weight"]),
        ("meta", Unsupported, ["trainer rank 1", "norm.weight", "meta device"]),
        ("missing", EngineRefused, ["down"]),
        ("unknown", EngineRefused, ["does not read rotary.inv_freq", "ignore=['rotary.inv_freq']"]),
        ("shape", EngineRefused, ["norm"]),
    ],
)
def test_a_mistake_is_told_to_every_trainer_rank_and_writes_nothing(mistake, kind, says):
    told, versions = run_world(2, 2, train_mistaken, serve, mistake)
    assert all(seen in ([], [0]) for seen in versions)
    assert told[0] == told[1]
    assert told[0][0] == kind.__name__
    assert all(word in told[0][1] for word in says), told[0][1]


def test_a_trainer_rank_that_never_shows_up_is_named():
    told, versions = run_world(2, 1, train_mistaken, serve, "absent")
    assert told[0][0] == "DeadlineExceeded"
    assert "trainer ranks [1]" in told[0][1]
    assert versions == [[]]
