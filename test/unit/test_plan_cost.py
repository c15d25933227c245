"""The cost model of `sglang-reshard plan`: which transport is predicted to be faster than which."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_reshard.cli.plan.cost import CPU, GPU, predicted_seconds
from sglang_reshard.errors import Unsupported
from support.plans import tensor_parallel_demands, tensor_parallel_strategy

HOSTS = st.lists(st.sampled_from("ab"), min_size=1, max_size=4)
DIMS = st.tuples(*[st.integers(-1, 1)] * 2, st.integers(-1, 0))


def seconds(transport, trainer_hosts, engine_hosts, dims=(0, 1, -1), bucket_bytes=1 << 20, costs=CPU):
    strategy = tensor_parallel_strategy(transport, trainer_hosts, engine_hosts, dims, bucket_bytes)
    _, demands, topology = tensor_parallel_demands(trainer_hosts, engine_hosts, dims)
    return predicted_seconds(strategy, topology, costs, demands)


@pytest.mark.parametrize("costs", [CPU, GPU])
def test_reading_memory_is_the_fastest_on_one_host(costs):
    of = {name: seconds(name, "aaaa", "aaaa", costs=costs) for name in ("ipc", "p2p", "broadcast", "nixl")}
    assert 0 < of["ipc"] == min(of.values())


def test_broadcasts_are_faster_where_many_ranks_on_another_host_need_the_same():
    """16 engine ranks need everything: point to point, each trainer rank sends its shard 12 times."""
    slow = dataclasses.replace(CPU, network_bytes_s=1e8, cores=0)
    hosts, whole = "a" * 4 + "b" * 12, (-1, -1, -1)
    assert seconds("broadcast", "aaaa", hosts, whole, costs=slow) < seconds("p2p", "aaaa", hosts, whole, costs=slow) / 2


def test_a_faster_network_makes_messages_between_hosts_faster():
    fast = dataclasses.replace(CPU, network_bytes_s=10 * CPU.network_bytes_s)
    assert seconds("p2p", "aaaa", "bb", costs=fast) < seconds("p2p", "aaaa", "bb")
    assert seconds("p2p", "aaaa", "aa", costs=fast) == seconds("p2p", "aaaa", "aa")


@given(HOSTS, HOSTS, DIMS, st.sampled_from([16384, 1 << 20]), st.sampled_from([CPU, GPU]))
@settings(max_examples=60)
def test_what_auto_chooses_is_never_predicted_to_be_slower_than_ipc_or_p2p(
    trainer_hosts, engine_hosts, dims, bucket_bytes, costs
):
    """Why `auto` predicts nothing: engine ranks that read what they can and are sent the rest need the least time."""
    auto = seconds("auto", trainer_hosts, engine_hosts, dims, bucket_bytes, costs)
    for transport in ("ipc", "p2p"):
        try:
            requested = seconds(transport, trainer_hosts, engine_hosts, dims, bucket_bytes, costs)
        except Unsupported:
            continue
        assert auto <= requested * (1 + 1e-9)
