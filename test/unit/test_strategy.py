"""Strategies: which are feasible, which the cost model prefers, and that a transport can be requested."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.plan import ClusterTopology, RankLocation, TensorIndex, choose_strategy, plan_reads, rank_demand
from sglang_reshard.plan.cost import CPU
from support.plans import tensor_parallel, tp_copies
from support.sweep import examples

MIB = 1 << 20


def chosen(transport, trainer_hosts, engine_hosts, dims=(0, 1, -1), bucket_bytes=MIB, costs=None):
    """Returns the strategy for tensors sharded by rows on trainer ranks and along `dims` on engine ranks."""
    shapes = [(512, 256), (256, 512), (256,)] * 4
    layout = tensor_parallel(len(trainer_hosts), shapes, [0] * len(shapes))
    index = TensorIndex.of(layout)
    copies = tp_copies(layout, list(dims) * 4, len(engine_hosts))
    demands = [
        rank_demand(
            index,
            plan_reads(index, own, RankLocation(rank, len(engine_hosts), host, tuple(trainer_hosts))),
            host,
            2,
        )
        for rank, (own, host) in enumerate(zip(copies, engine_hosts, strict=True))
    ]
    return choose_strategy(transport, index, demands, ClusterTopology.of(demands, trainer_hosts), bucket_bytes, costs)


def test_memory_is_read_on_one_host():
    strategy = chosen("auto", "aaaa", "aaaa")
    assert strategy.name == "ipc"
    assert not strategy.round_bytes.any()
    assert strategy.reason.startswith("auto: predicted transfer time")
    assert "p2p" in strategy.reason
    assert "broadcast" in strategy.reason


def test_trainer_ranks_send_between_hosts_and_are_read_on_one():
    strategy = chosen("auto", "aabb", "aabb")
    assert strategy.name == "ipc+p2p"
    for trainer_rank, engine_rank in np.argwhere(strategy.round_bytes):
        assert "aabb"[trainer_rank] != "aabb"[engine_rank]
    assert strategy.round_bytes.any()


def test_trainer_and_engine_on_different_hosts():
    strategy = chosen("auto", "aaaa", "bb")
    assert strategy.name == "p2p"
    assert strategy.round_bytes.all()
    with pytest.raises(Unsupported, match=r"engine rank 0 on b .*trainer rank 0 on a .*transport='p2p'"):
        chosen("ipc", "aaaa", "bb")
    with pytest.raises(Unsupported, match=r"trainer rank 0 .*transport='p2p'"):
        chosen("broadcast", "aaaa", "bb")


@pytest.mark.parametrize("transport", ["ipc", "p2p", "broadcast"])
def test_a_requested_transport_is_used(transport):
    strategy = chosen(transport, "aaaa", "aaaa")
    assert (strategy.name, strategy.reason) == (transport, "requested")
    assert strategy.predicted_seconds > 0


def test_an_unknown_transport_is_refused():
    with pytest.raises(Mismatch, match="'carrier pigeon' is not one of: auto, ipc, p2p, broadcast"):
        chosen("carrier pigeon", "a", "a")


def test_tensors_that_many_ranks_on_another_host_need_are_broadcast():
    """16 engine ranks need everything: point to point, each trainer rank would send its shard 12 times."""
    slow = dataclasses.replace(CPU, network_bytes_s=1e8, shares_cores=False)
    hosts = "a" * 4 + "b" * 12
    strategy = chosen("auto", "aaaa", hosts, dims=(-1, -1, -1), costs=slow)
    assert strategy.name == "broadcast"
    assert strategy.broadcast is not None
    assert strategy.broadcast.buckets


@given(
    st.lists(st.sampled_from("ab"), min_size=1, max_size=4),
    st.lists(st.sampled_from("ab"), min_size=1, max_size=4),
    st.tuples(*[st.integers(-1, 1)] * 2, st.integers(-1, 0)),
    st.sampled_from([16384, MIB]),
)
@settings(max_examples=examples(40))
def test_auto_is_never_predicted_to_be_slower_than_a_requested_transport(
    trainer_hosts, engine_hosts, dims, bucket_bytes
):
    auto = chosen("auto", trainer_hosts, engine_hosts, dims, bucket_bytes=bucket_bytes)
    for transport in ("ipc", "p2p", "broadcast"):
        try:
            fixed = chosen(transport, trainer_hosts, engine_hosts, dims, bucket_bytes=bucket_bytes)
        except Unsupported:
            continue
        assert auto.predicted_seconds <= fixed.predicted_seconds * (1 + 1e-9)
    assert auto.digest() == chosen("auto", trainer_hosts, engine_hosts, dims, bucket_bytes=bucket_bytes).digest()
