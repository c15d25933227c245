"""Whole updates in real processes on gloo: DTensor shards in, bit-exact engine parameters out."""

import threading

import pytest
import torch

from sglang_reshard.api.weight_sender import WeightSender
from sglang_reshard.engine.receiver import WeightReceiver
from sglang_reshard.engine.targets import TracedModel
from sglang_reshard.errors import EngineRefused, Mismatch, ReshardError, Unsupported
from support.left_behind import torch_segments
from support.nixl_env import needs_nixl, use_nixl
from support.sweep import only, sweep
from support.toy import ToyRank, checkpoint
from support.toy_trainers import PAIRS, State, assert_told_alike
from support.world import run_world

MIB = 1 << 20


def train(trainer, mesh_shape, kind, dtype, bucket_bytes, updates, transport, _live_dtype=None, verify="off"):
    if transport == "nixl":
        use_nixl()
    sender = WeightSender.over(
        trainer.group, trainer.send, bucket_bytes=bucket_bytes, timeout_s=30, transport=transport
    )
    state = State(mesh_shape, kind, dtype)
    reports = []
    for version in range(1, updates + 1):
        state.become(version)
        reports.append(sender.update(state.given, weight_version=str(version), verify=verify))
    sender.close()
    return reports


def serve(
    rank, size, requests, mesh_shape, kind, dtype, bucket_bytes, updates, transport, live_dtype=None, verify="off"
):
    if transport == "nixl":
        use_nixl()
    live_dtype = live_dtype or dtype
    model = ToyRank(rank, size, live_dtype)
    receiver = WeightReceiver(TracedModel(model), rank, size, torch.device("cpu"))
    addresses = {n: p.data_ptr() for n, p in model.named_parameters()}
    differing = []
    for version, request in enumerate(requests, start=1):
        requests.answer(receiver.update(request))
        stock = ToyRank(rank, size, live_dtype)
        stock.load_weights(checkpoint(version, dtype).items())
        for name, parameter in stock.named_parameters():
            live = getattr(model, name)
            if not torch.equal(live, parameter):
                differing.append((version, name))
    assert addresses == {n: p.data_ptr() for n, p in model.named_parameters()}
    return differing


def run(mesh_shape, engines, kind, dtype=torch.float32, bucket_bytes=MIB, updates=2, transport="broadcast", **options):
    trainers = int(torch.Size(mesh_shape).numel())
    arguments = mesh_shape, kind, dtype, bucket_bytes, updates, transport, *options.values()
    reports, differing = run_world(trainers, engines, train, serve, *arguments)
    assert differing == [[]] * engines
    assert_told_alike(reports)
    return reports[0]


@pytest.mark.parametrize(("mesh_shape", "engines", "kind"), PAIRS)
def test_every_parameter_is_bit_exact_after_each_update(mesh_shape, engines, kind):
    run(mesh_shape, engines, kind)


NIXL = pytest.param("nixl", marks=needs_nixl)
FEW = [((3,), 4, "fsdp"), ((2, 2), 4, "fsdp_tp")]


@pytest.mark.parametrize("transport", ["ipc", "p2p", NIXL])
@pytest.mark.parametrize(("mesh_shape", "engines", "kind"), only(PAIRS, FEW.__contains__))
def test_exact_transports_move_exactly_what_is_lacking(mesh_shape, engines, kind, transport):
    for report in run(mesh_shape, engines, kind, transport=transport):
        assert report.transport == transport
        assert report.transport_reason == "requested"
        for rank in report.engine_ranks:
            assert rank.received_bytes >= rank.least_bytes
            assert rank.received_bytes == rank.least_bytes or transport == "nixl", "only NIXL reads gaps as well"
        assert sum(t.sent_bytes for t in report.trainer_ranks) == sum(r.least_bytes for r in report.engine_ranks)


@pytest.mark.parametrize("transport", ["p2p", NIXL])
def test_weights_are_cast_where_they_arrive(transport):
    run((2,), 4, "tp", transport=transport, live_dtype=torch.bfloat16, verify="full")


@pytest.mark.parametrize("transport", ["broadcast", "p2p", NIXL])
@pytest.mark.parametrize("bucket_bytes", [sweep(1), 100, sweep(4096)])
def test_any_bucket_size_carries_the_same_bits(bucket_bytes, transport):
    report = run((2,), 4, "tp", bucket_bytes=bucket_bytes, transport=transport)[-1]
    assert report.bucket_bytes == bucket_bytes


def test_auto_reads_memory_on_one_host_and_says_why():
    report = run((3,), 2, "tp", transport="auto")[-1]
    assert report.transport == "ipc"
    assert report.transport_reason == "auto: engine ranks read memory of their own hosts"


def test_half_precision():
    run((2,), 4, "tp", dtype=torch.bfloat16)


def test_a_broadcast_rank_receives_its_trainer_ranks_shard_and_no_more():
    report = run((4,), 16, "tp")[-1]
    shard = report.trainer_ranks[0].shard_bytes
    assert report.transport == "broadcast"
    for rank in report.engine_ranks:
        assert rank.least_bytes <= rank.received_bytes
    assert [t.rank for t in report.trainer_ranks] == list(range(4))
    total = sum(t.sent_bytes for t in report.trainer_ranks)
    assert total < 2 * sum(t.shard_bytes for t in report.trainer_ranks)
    assert shard > 0


def test_the_second_update_neither_traces_nor_plans():
    first, second = run((2,), 4, "tp")
    assert {"trace", "plan", "connect", "move"} <= set(first.seconds)
    assert not {"trace", "plan", "connect"} & set(second.seconds)


def train_with_a_name_to_be_ignored(trainer):
    sender = WeightSender.over(trainer.group, trainer.send, timeout_s=30)
    named = [*checkpoint(1).items(), ("rotary.inv_freq", torch.ones(3))]
    report = sender.update(named, ignore=["rotary.*"])
    sender.close()
    return report.message


def test_names_that_are_to_be_ignored_are_told():
    told, _ = run_world(1, 2, train_with_a_name_to_be_ignored, serve_untouched, deadline_s=60)
    assert told == ["ignored: rotary.inv_freq"]


def train_with_a_tied_head(trainer):
    sender = WeightSender.over(trainer.group, trainer.send, timeout_s=30)
    state = checkpoint(1)
    tied = sender.update([*state.items(), ("lm_head.weight", state["embed.weight"].detach())])
    with pytest.raises(EngineRefused) as untied:
        sender.update([*state.items(), ("lm_head.bias", torch.zeros(3))])
    sender.close()
    return tied.message, str(untied.value)


def test_a_tied_head_needs_no_mention_and_another_unread_name_does():
    told, _ = run_world(1, 2, train_with_a_tied_head, serve_untouched)
    tied, untied = told[0]
    assert tied == "the engine does not read lm_head.weight"
    assert "ignore=['lm_head.bias']" in untied


def train_twice_at_once(trainer):
    """While the engine is asked, another thread tries an update of its own."""
    refusals = []

    def send(request):
        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()
        return trainer.send(request)

    def intrude():
        try:
            sender.update(checkpoint(2).items())
        except Mismatch as error:
            refusals.append(str(error))

    sender = WeightSender.over(trainer.group, send, timeout_s=30)
    first = sender.update(checkpoint(1).items())
    second = sender.update(checkpoint(1).items())
    sender.close()
    return first.success, second.success, refusals


def test_one_update_at_a_time():
    told, _ = run_world(1, 1, train_twice_at_once, serve_untouched)
    first, second, refusals = told[0]
    assert first
    assert second
    assert refusals == [
        f"trainer rank 0: update {n} is running in another thread; wait for it to return" for n in (1, 2)
    ]


# -- mistakes: refused on every trainer rank, nothing written


def train_mistaken(trainer, mistake):
    sender = WeightSender.over(trainer.group, trainer.send, timeout_s=5)
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
    if mistake == "absent" and trainer.rank == 1:
        sender.close()
        return None
    try:
        sender.update(state.items())
    except ReshardError as error:
        return type(error).__name__, str(error)
    finally:
        sender.close()
    return "no error"


def serve_untouched(rank, size, requests, mistake=None):
    model = ToyRank(rank, size)
    model.load_weights(checkpoint(0).items())
    before = {n: p.clone() for n, p in model.named_parameters()}
    receiver = WeightReceiver(TracedModel(model), rank, size, torch.device("cpu"))
    for request in requests:
        requests.answer(receiver.update(request))
    assert not receiver.torn
    return all(torch.equal(p, before[n]) for n, p in model.named_parameters())


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
    told, untouched = run_world(2, 2, train_mistaken, serve_untouched, mistake)
    assert untouched == [True, True]
    assert told[0] == told[1]
    assert told[0][0] == kind.__name__
    assert all(word in told[0][1] for word in says), told[0][1]


def test_a_trainer_rank_that_never_shows_up_is_named():
    told, untouched = run_world(2, 1, train_mistaken, serve_untouched, "absent")
    assert told[0][0] == "DeadlineExceeded"
    assert "trainer ranks [1]" in told[0][1]
    assert untouched == [True]


def serve_refusing_once_on_one_rank(rank, size, requests):
    model = ToyRank(rank, size)
    receiver = WeightReceiver(TracedModel(model), rank, size, torch.device("cpu"))
    for version, request in enumerate(requests, start=1):
        requests.answer(receiver.update(request, "busy" if (version, rank) == (1, 1) else ""))
    stock = ToyRank(rank, size)
    stock.load_weights(checkpoint(3).items())
    return all(torch.equal(p, getattr(model, n)) for n, p in stock.named_parameters())


def test_ranks_that_stopped_at_different_points_meet_again_in_the_next_update():
    told, exact = run_world(1, 2, train_through_refusals, serve_refusing_once_on_one_rank)
    (refused, *rest) = told[0]
    assert refused == ("EngineRefused", "prepare, engine rank 1: busy")
    assert rest == [True, True]
    assert exact == [True, True]


# -- a failure while bytes are moving


def train_through_refusals(trainer):
    sender = WeightSender.over(trainer.group, trainer.send, timeout_s=5)
    state = checkpoint(0)

    def update(version):
        for name, tensor in checkpoint(version).items():
            state[name].copy_(tensor)
        try:
            return sender.update(state.items()).success
        except ReshardError as error:
            return type(error).__name__, str(error)

    told = [update(version) for version in (1, 2, 3)]
    sender.close()
    return told


def serve_with_a_fault(rank, size, requests):
    """Engine rank 1 fails in the middle of the second update."""
    model = ToyRank(rank, size)
    receiver = WeightReceiver(TracedModel(model), rank, size, torch.device("cpu"))
    torn = []
    for version, request in enumerate(requests, start=1):
        if (version, rank) == (2, 1):

            def fail(*_):
                raise OSError("the wire was cut")

            receiver._executor.transfer.end.move = fail
        requests.answer(receiver.update(request))
        torn.append(bool(receiver.torn))
    stock = ToyRank(rank, size)
    stock.load_weights(checkpoint(3).items())
    return torn, all(torch.equal(p, getattr(model, n)) for n, p in stock.named_parameters())


def test_an_update_that_broke_off_tears_all_ranks_and_the_next_one_heals_them():
    told, served = run_world(2, 2, train_through_refusals, serve_with_a_fault)
    assert told[0] == told[1]
    assert told[0][0] is True
    kind, message = told[0][1]
    assert kind == "TornWeights"
    assert "engine rank 1: OSError: the wire was cut" in message
    assert told[0][2] is True
    assert served == [([False, True, False], True)] * 2


def test_no_shared_memory_is_left_behind():
    before = torch_segments()
    run((2,), 2, "tp")
    assert torch_segments() <= before
