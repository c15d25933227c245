"""The choice of a strategy: `auto` reads what can be read and sends the rest, and a transport can be requested."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_reshard.errors import Mismatch, Unsupported
from support.plans import tensor_parallel_strategy

HOSTS = st.lists(st.sampled_from("ab"), min_size=1, max_size=4)
DIMS = st.tuples(*[st.integers(-1, 1)] * 2, st.integers(-1, 0))


def test_trainer_ranks_send_between_hosts_and_are_read_on_one():
    strategy = tensor_parallel_strategy("auto", "aabb", "aabb")
    assert strategy.name == "ipc+p2p"
    assert strategy.reason == (
        "auto: engine ranks read what they can; engine rank 2 on b needs shards that no trainer rank on that "
        "host holds (trainer rank 0 on a does)"
    )
    assert strategy.round_bytes.any()


def test_trainer_and_engine_on_different_hosts():
    strategy = tensor_parallel_strategy("auto", "aaaa", "bb")
    assert strategy.name == "p2p"
    assert strategy.reason.startswith("auto: engine ranks read nothing; engine rank 0 on b needs shards")
    assert strategy.round_bytes.all()
    with pytest.raises(Unsupported, match=r"engine rank 0 on b .*trainer rank 0 on a .*transport='p2p'"):
        tensor_parallel_strategy("ipc", "aaaa", "bb")
    with pytest.raises(Unsupported, match=r"trainer rank 0 .*transport='p2p'"):
        tensor_parallel_strategy("broadcast", "aaaa", "bb")


def test_an_unknown_transport_is_refused():
    with pytest.raises(Mismatch, match="'carrier pigeon' is not one of: auto, ipc, p2p, broadcast"):
        tensor_parallel_strategy("carrier pigeon", "a", "a")


def test_tensors_that_many_ranks_on_another_host_need_are_sent_unless_broadcast_is_requested():
    hosts = "a" * 4 + "b" * 12
    assert tensor_parallel_strategy("auto", "aaaa", hosts, dims=(-1, -1, -1)).name == "ipc+p2p"
    requested = tensor_parallel_strategy("broadcast", "aaaa", hosts, dims=(-1, -1, -1))
    assert requested.broadcasts.groups


@given(HOSTS, HOSTS, DIMS, st.sampled_from([16384, 1 << 20]))
@settings(max_examples=60)
def test_auto_sends_exactly_what_engine_ranks_cannot_read(trainer_hosts, engine_hosts, dims, bucket_bytes):
    def chosen(transport):
        return tensor_parallel_strategy(transport, trainer_hosts, engine_hosts, dims, bucket_bytes)

    auto, needed = chosen("auto"), chosen("p2p").round_bytes > 0  # p2p sends everything that is needed
    on_one_host = np.array(trainer_hosts)[:, None] == np.array(engine_hosts)[None, :]
    assert ((auto.round_bytes > 0) == (needed & ~on_one_host)).all()
    reads, sends = (needed & on_one_host).any(), (needed & ~on_one_host).any()
    assert auto.name == ("ipc+p2p" if reads and sends else "p2p" if sends else "ipc")
    assert auto.digest() == chosen("auto").digest()
    if not sends:
        assert auto.digest() == chosen("ipc").digest()
    else:
        with pytest.raises(Unsupported, match="transport='ipc' reads memory on the same host only"):
            chosen("ipc")
