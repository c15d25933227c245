"""No GPU is twice in one communicator, every link is in exactly one, and there is one where nothing clashes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_reshard.errors import Unsupported
from sglang_reshard.gpu.rank_info import RankGpuInfo
from sglang_reshard.plan import ClusterTopology
from sglang_reshard.routes.p2p.groups import plan_p2p_groups


def on(*gpus):
    return tuple(RankGpuInfo(uuid=gpu) for gpu in gpus)


def topology(trainers, engines, hosts):
    return ClusterTopology(("t",) * len(trainers), tuple(hosts), trainers, engines, {})


@st.composite
def clusters(draw):
    """Up to 6 GPUs on up to 3 hosts; ranks on any of them, or on none."""
    gpus = st.sampled_from(["", *(f"GPU-{n}" for n in range(6))])
    trainers, engines = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    links = draw(st.lists(st.sampled_from([0, 0, 16]), min_size=trainers * engines, max_size=trainers * engines))
    hosts = draw(st.lists(st.sampled_from("abc"), min_size=engines, max_size=engines))
    return (
        np.array(links, np.int64).reshape(trainers, engines),
        on(*draw(st.lists(gpus, min_size=trainers, max_size=trainers))),
        on(*draw(st.lists(gpus, min_size=engines, max_size=engines))),
        hosts,
    )


@given(cluster=clusters())
def test_any_cluster(cluster):
    links, trainers, engines, hosts = cluster
    gpus = [device.uuid for device in (*trainers, *engines)]

    def twice(members):
        known = [gpus[m] for m in members if gpus[m]]
        return any(gpu.uuid for gpu in engines) and len(known) > len(set(known))

    groups = plan_p2p_groups(links, topology(trainers, engines, hosts))
    assert groups == plan_p2p_groups(links, topology(trainers, engines, hosts))
    if any(map(twice, groups)):
        alone = [(*np.flatnonzero(links[:, e]).tolist(), len(trainers) + e) for e in range(len(engines))]
        assert any(len(members) > 1 and twice(members) for members in alone)
        return
    assert all(list(members) == sorted(set(members)) for members in groups)
    for trainer_rank, engine_rank in np.argwhere(links).tolist():
        holding = [members for members in groups if len(trainers) + engine_rank in members]
        assert len(holding) == 1
        assert trainer_rank in holding[0]
    members = sorted({m for group in groups for m in group})
    linked = {*np.flatnonzero(links.any(axis=1)), *(np.flatnonzero(links.any(axis=0)) + len(trainers))}
    assert set(members) == linked, "a rank without a link would be waited for"
    assert len(groups) <= 1 or twice(members)
    firsts = [next(m for m in group if m >= len(trainers)) for group in groups]
    assert firsts == sorted(firsts)


@given(cluster=clusters())
def test_ranks_without_gpus_are_in_one_group(cluster):
    links, trainers, engines, hosts = cluster
    groups = plan_p2p_groups(links, topology(trainers, on(*[""] * len(engines)), hosts))
    assert len(groups) == bool(links.any())


def test_an_engine_over_two_of_four_trainer_hosts_has_a_communicator_for_each_of_its_hosts():
    """Trainer ranks 0 to 7 on hosts a to d, two on each; engine ranks 0 to 3 on the GPUs of a and b."""
    trainers = on(*(f"{host}{n}" for host in "abcd" for n in range(2)))
    engines, hosts = on("a0", "a1", "b0", "b1"), ["a", "a", "b", "b"]
    links = np.full((8, 4), 16)
    links[:2, :2] = links[2:4, 2:] = 0  # read by handle
    groups = plan_p2p_groups(links, topology(trainers, engines, hosts))
    assert groups == ((2, 3, 4, 5, 6, 7, 8, 9), (0, 1, 4, 5, 6, 7, 10, 11))


def test_an_engine_rank_has_one_of_its_own_where_its_host_does_not_suffice():
    """Trainer rank 1 sends to engine rank 0, and is on the GPU of engine rank 1."""
    links = np.array([[0, 16], [16, 0], [16, 16]])
    groups = plan_p2p_groups(links, topology(on("g0", "g1", "h0"), on("g0", "g1"), ["a", "a"]))
    assert groups == ((1, 2, 3), (0, 2, 4))


@pytest.mark.parametrize(
    ("trainers", "says"),
    [
        (("g0", "h0"), r"trainer rank 0 and engine rank 0 share one GPU \(g0\), .* only once in a communicator$"),
        (("h0", "h0"), r"trainer rank 0 and trainer rank 1 share one GPU \(h0\), .* its own GPU"),
    ],
)
def test_ranks_that_must_be_members_of_one_are_named(trainers, says):
    of = topology(on(*trainers), on("g0"), ["a"])
    (members,) = plan_p2p_groups(np.array([[16], [16]]), of)
    with pytest.raises(Unsupported, match=says):
        of.check_communicator(members)


def test_broadcasts_among_engine_ranks_of_one_gpu_are_refused():
    of = topology(on("g0"), on("g0", "g1", "g1"), "aaa")
    of.check_communicator([1, 2])
    with pytest.raises(Unsupported, match=r"engine rank 1 and engine rank 2 share one GPU \(g1\), .* use another"):
        of.check_communicator([2, 3], cure="use another")
