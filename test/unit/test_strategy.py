"""The way an update goes: what is possible, what the cost model prefers, and that it can be overridden."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.plan import ClusterTopology, RankLocation, TensorIndex, choose_strategy, plan_reads, rank_demand
from sglang_reshard.plan.cost import CPU
from support.plans import tensor_parallel, tp_copies

MIB = 1 << 20


def asked(transport, trainer_hosts, engine_hosts, dims=(0, 1, -1), device="cpu", bucket_bytes=MIB, **changes):
    """The choice for tensors sharded by rows on trainer ranks, and as `dims` say on engine ranks."""
    shapes = [(512, 256), (256, 512), (256,)] * 4
    layout = tensor_parallel(len(trainer_hosts), shapes, [0] * len(shapes))
    catalog = TensorIndex.of(layout)
    copies = tp_copies(layout, list(dims) * 4, len(engine_hosts))
    needs = [
        rank_demand(
            catalog,
            plan_reads(catalog, own, RankLocation(rank, len(engine_hosts), host, tuple(trainer_hosts))),
            host,
            2,
        )
        for rank, (own, host) in enumerate(zip(copies, engine_hosts, strict=True))
    ]
    setting = dataclasses.replace(ClusterTopology.of(needs, trainer_hosts, device), **changes)
    return choose_strategy(transport, catalog, needs, setting, bucket_bytes)


def test_on_one_host_memory_is_read():
    choice = asked("auto", "aaaa", "aaaa")
    assert choice.name == "ipc"
    assert not choice.round_bytes.any()
    assert choice.reason.startswith("auto: predicted transfer time")
    assert "p2p" in choice.reason
    assert "broadcast" in choice.reason


def test_between_hosts_trainer_ranks_send_and_on_one_they_are_read():
    choice = asked("auto", "aabb", "aabb")
    assert choice.name == "ipc+p2p"
    for trainer_rank, engine_rank in np.argwhere(choice.round_bytes):
        assert "aabb"[trainer_rank] != "aabb"[engine_rank]
    assert choice.round_bytes.any()


def test_trainer_and_engine_on_different_hosts():
    choice = asked("auto", "aaaa", "bb")
    assert choice.name == "p2p"
    assert choice.round_bytes.all()
    with pytest.raises(Unsupported, match=r"engine rank 0 on b .*trainer rank 0 on a .*transport='p2p'"):
        asked("ipc", "aaaa", "bb")
    with pytest.raises(Unsupported, match=r"trainer rank 0 .*transport='p2p'"):
        asked("broadcast", "aaaa", "bb")


@pytest.mark.parametrize("transport", ["ipc", "p2p", "broadcast"])
def test_a_way_that_is_asked_for_is_gone(transport):
    choice = asked(transport, "aaaa", "aaaa")
    assert (choice.name, choice.reason) == (transport, "requested")
    assert choice.predicted_seconds > 0


def test_a_way_that_does_not_exist_is_refused():
    with pytest.raises(Mismatch, match="'carrier pigeon' is not one of: auto, ipc, p2p, broadcast"):
        asked("carrier pigeon", "a", "a")


def test_what_many_ranks_of_another_host_need_whole_is_broadcast():
    """16 engine ranks want everything: sent point to point, each trainer rank would send its shard 12 times."""
    slow = dataclasses.replace(CPU, network_bytes_s=1e8, shares_cores=False)
    hosts = "a" * 4 + "b" * 12
    choice = asked("auto", "aaaa", hosts, dims=(-1, -1, -1), costs=slow)
    assert choice.name == "broadcast"
    assert choice.broadcast is not None
    assert choice.broadcast.buckets


def test_two_ranks_on_one_gpu_are_not_put_into_one_group():
    assert asked("auto", "aabb", "aabb", device="cuda").name == "broadcast"
    assert asked("auto", "aaaa", "bb", device="cuda").name == "p2p"
    assert asked("auto", "aaaa", "aaaa", device="cuda").name == "ipc"


@given(
    st.lists(st.sampled_from("ab"), min_size=1, max_size=4),
    st.lists(st.sampled_from("ab"), min_size=1, max_size=4),
    st.tuples(*[st.integers(-1, 1)] * 2, st.integers(-1, 0)),
    st.sampled_from([16384, MIB]),
)
@settings(max_examples=40)
def test_auto_is_never_predicted_to_be_slower_than_a_fixed_way(trainer_hosts, engine_hosts, dims, bucket_bytes):
    auto = asked("auto", trainer_hosts, engine_hosts, dims, bucket_bytes=bucket_bytes)
    for transport in ("ipc", "p2p", "broadcast"):
        try:
            fixed = asked(transport, trainer_hosts, engine_hosts, dims, bucket_bytes=bucket_bytes)
        except Unsupported:
            continue
        assert auto.predicted_seconds <= fixed.predicted_seconds
    assert auto.digest() == asked("auto", trainer_hosts, engine_hosts, dims, bucket_bytes=bucket_bytes).digest()
