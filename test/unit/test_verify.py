"""What has arrived is compared with what was sent; what is staged does not count until it was."""

import itertools

import pytest
import torch

from sglang_reshard.api.weight_sender import WeightSender
from sglang_reshard.engine.receiver import WeightReceiver
from sglang_reshard.engine.targets import TracedModel
from sglang_reshard.engine.update import UpdateExecutor
from sglang_reshard.errors import EngineRefused, TornWeights
from support.sweep import only, sweep
from support.toy import ToyRank, checkpoint
from support.toy_trainers import PAIRS, State
from support.world import run_world

TRANSPORTS = ["ipc", "p2p", "broadcast"]
GOOD = list(itertools.product(TRANSPORTS, ["sample", "full"], [False, True]))
TRIED = [("ipc", "full", False), ("p2p", "full", True), ("broadcast", "sample", False), ("ipc", "sample", True)]
LAYOUTS = [((2, 2), 4, "fsdp_tp"), ((2, 2), 2, "stacked"), ((2, 2), 2, "fused")]


def same(model, version, dtype=torch.float32):
    stock = ToyRank(model.rank, model.size, dtype)
    stock.load_weights(checkpoint(version).items())
    return all(torch.equal(getattr(model, name), parameter) for name, parameter in stock.named_parameters())


def train(trainer, mesh_shape, kind, transport, options, *_):
    """Versions 1, 2, 3, ...: one with each of these options; what each ended with."""
    state = State(mesh_shape, kind, torch.float32)
    sender = WeightSender.over(trainer.group, trainer.send, transport=transport, timeout_s=30)
    ends = []
    for version, given in enumerate(options, start=1):
        state.become(version)
        try:
            ends.append(sender.update(state.given, **given))
        except (EngineRefused, TornWeights) as error:
            ends.append((type(error), str(error)))
    sender.close()
    return ends


def serve(rank, size, requests, mesh_shape, kind, transport, options, spoiled=None, spoil=None, dtype=torch.float32):
    """In update number `spoiled` engine rank 1's memory is spoiled when all has arrived; the versions it is at then."""
    model = ToyRank(rank, size, dtype)
    receiver = WeightReceiver(TracedModel(model), rank, size, torch.device("cpu"))
    move, states = UpdateExecutor._move, []

    def spoiling(executor, context):
        move(executor, context)
        if context.request.update == spoiled and rank == 1:
            transfer = executor.transfer
            spoil(transfer.landing.program.targets)

    UpdateExecutor._move = spoiling
    for number, request in enumerate(requests, start=1):
        requests.answer(receiver.update(request))
        states.append(
            (same(model, number - 1, dtype) if number > 1 else None, same(model, number, dtype), receiver.torn)
        )
    return states


def flip_a_bit(targets):
    name = next(n for n in targets if n.startswith("down"))
    targets[name].view(torch.int32)[5] ^= 1 << 7


def swap_elements(targets):
    name = next(n for n in targets if n.startswith("qkv"))
    flat = targets[name]
    flat[2], flat[17] = flat[17].clone(), flat[2].clone()


@pytest.mark.parametrize(("transport", "verify", "staged"), only(GOOD, TRIED.__contains__))
def test_good_updates_pass(transport, verify, staged):
    options = [{"verify": verify, "staged": staged}] * 2 + [{}, {"verify": verify}]
    trainers, engines = run_world(4, 4, train, serve, (2, 2), "fsdp_tp", transport, options)
    for ends in trainers:
        assert [end.verified for end in ends] == [verify, verify, "off", verify]
        assert [len(end.digest) for end in ends] == [16 if end.verified == "full" else 0 for end in ends]
        assert all("verify" in end.seconds for end in (ends[0], ends[1], ends[3]))
        assert [any(r.staged_bytes for r in end.engine_ranks) for end in ends] == [staged, staged, False, False]
    for states in engines:
        assert [(now, torn) for _, now, torn in states] == [(True, "")] * 4


@pytest.mark.parametrize(("mesh_shape", "engines", "kind"), only(PAIRS, LAYOUTS.__contains__))
def test_all_layouts_are_verified(mesh_shape, engines, kind):
    trainers = int(torch.Size(mesh_shape).numel())
    ends, _ = run_world(trainers, engines, train, serve, mesh_shape, kind, "ipc", [{"verify": "full"}])
    assert all(end.verified == "full" for (end,) in ends)
    assert len({end.digest for (end,) in ends} - {""}) == 1


def train_apart(trainer):
    """Every trainer rank passes all tensors whole. One of the names means another tensor on trainer rank 1."""
    weights = {name: tensor.clone() for name, tensor in checkpoint(1).items()}
    weights["q.weight"] += trainer.rank
    sender = WeightSender.over(trainer.group, trainer.send, transport="p2p", timeout_s=30)
    with pytest.raises(TornWeights) as told:
        sender.update(weights.items(), partial=True, verify="full")
    sender.close()
    return str(told.value)


def serve_apart(rank, size, requests):
    receiver = WeightReceiver(TracedModel(ToyRank(rank, size)), rank, size, torch.device("cpu"))
    for request in requests:
        requests.answer(receiver.update(request))


def test_one_name_of_two_tensors_is_told_from_damage():
    told, _ = run_world(2, 2, train_apart, serve_apart)
    for said in told:
        assert "Trainer ranks [0, 1] hold different values of q.weight" in said
        assert "network" not in said


def test_casts_are_accounted_for():
    arguments = (3,), "fsdp", "ipc", [{"verify": "full"}], None, None, torch.bfloat16
    ends, engines = run_world(3, 2, train, serve, *arguments)
    assert all(end.verified == "full" for (end,) in ends)
    assert all(states[0][1] for states in engines)


@pytest.mark.parametrize(
    ("spoil", "transport"),
    [
        (flip_a_bit, "ipc"),
        (swap_elements, "p2p"),
        (flip_a_bit, "broadcast"),
        sweep(flip_a_bit, "p2p"),
        sweep(swap_elements, "ipc"),
        sweep(swap_elements, "broadcast"),
    ],
)
def test_what_is_spoiled_is_found_named_and_healed(spoil, transport):
    options = [{}, {"verify": "full"}, {"verify": "full"}]
    trainers, engines = run_world(2, 2, train, serve, (2,), "tp", transport, options, 2, spoil)
    name = "down.weight" if spoil is flip_a_bit else "q.weight"
    for first, second, third in trainers:
        assert first.success
        assert second[0] is TornWeights
        assert "verify, engine rank 1" in second[1]
        assert name in second[1]
        assert third.success
    for states in engines:
        assert [torn != "" for *_, torn in states] == [False, True, False]
        assert states[2][1]


def test_staged_weights_that_are_spoiled_never_count():
    options = [{}, {"verify": "full", "staged": True}, {"verify": "full", "staged": True}]
    trainers, engines = run_world(2, 2, train, serve, (2,), "tp", "ipc", options, 2, flip_a_bit)
    for _, second, third in trainers:
        assert second[0] is EngineRefused
        assert "down.weight" in second[1]
        assert third.success
    for states in engines:
        assert states[1] == (True, False, ""), "the old weights, not torn"
        assert states[2][1:] == (True, "")


def test_without_verification_nobody_notices():
    """What the others show is not noticed by chance."""
    trainers, engines = run_world(2, 2, train, serve, (2,), "tp", "ipc", [{}, {}], 2, flip_a_bit)
    assert all(second.success for _, second in trainers)
    assert not engines[1][1][1]
