"""The check for NaN and infinity before an update: finds all, gives the index, and copies next to nothing."""

import pytest
import torch

from sglang_reshard.extras import finite
from sglang_reshard.extras.finite import not_finite
from sglang_reshard.layout.source_layout import compute_shard_map
from sglang_reshard.sources import Mesh, Placement, SourceLayout, SourceTensor, describe
from support.largest import LargestResult

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
EIGHT_BITS = {  # the bytes that are a NaN or an infinity
    torch.float8_e4m3fn: ([127, 255], []),
    torch.float8_e5m2: ([125, 126, 127, 253, 254, 255], [124, 252]),
    torch.float8_e4m3fnuz: ([128], []),
    torch.float8_e5m2fnuz: ([128], []),
    torch.float8_e8m0fnu: ([255], []),
}
NAN, INF = float("nan"), float("inf")


def found(**tensors):
    state = describe(tensors.items(), trainer_rank=0, global_ranks=(0,))
    return not_finite(state.layout, state.shards, 0)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_one_bad_element_is_found_with_its_index(dtype, value):
    weight = torch.zeros(5, 7, dtype=dtype)
    assert found(w=weight) is None
    weight[3, 6] = value
    kind = "1 NaN" if value != value else "1 infinite"
    assert found(good=torch.ones(3), w=weight) == (
        f"trainer rank 0: 1 of the 35 elements of w on this rank are not finite ({kind}), "
        "the first at global index (3, 6)"
    )


def test_the_largest_finite_values_are_finite():
    for dtype in FLOATS:
        limits = torch.finfo(dtype)
        assert found(w=torch.tensor([limits.max, limits.min, limits.tiny, 0.0, -0.0] * 1000, dtype=dtype)) is None


def test_the_first_bad_tensor_is_named_and_its_elements_counted():
    second = torch.tensor([[1.0, INF], [NAN, NAN]])
    told = found(first=torch.ones(2), second=second, third=torch.tensor(NAN))
    assert "3 of the 4 elements of second" in told
    assert "(2 NaN, 1 infinite)" in told
    assert "index (0, 1)" in told
    assert "index ()" in found(scalar=torch.tensor(NAN))


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_eight_bit_floats(dtype):
    nans, infinities = EIGHT_BITS[dtype]
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    good = [b for b in range(256) if b not in nans + infinities]
    assert found(w=every[good].view(dtype)) is None
    told = found(w=every.view(dtype))
    assert f"{len(nans + infinities)} of the 256" in told
    assert f"{len(nans)} NaN" in told
    assert f"index ({min(nans + infinities)},)" in told


def test_integers_and_empty_shards_are_finite():
    integers = {"i": torch.full((3,), -1), "u": torch.tensor([255], dtype=torch.uint8), "b": torch.tensor([True])}
    assert found(**integers, none=torch.empty(0, 3)) is None


def test_views_of_a_buffer_are_checked_and_nothing_beside_them(monkeypatch):
    monkeypatch.setattr(finite, "CHUNK", 4)
    buffer = torch.full((60,), NAN)
    view = buffer[7:55:2].view(4, 6)
    view.zero_()
    assert found(w=view, t=view.t(), e=view[:1].expand(5, 6)) is None
    view[2, 5] = INF
    assert "index (2, 5)" in found(w=view)
    assert "index (5, 2)" in found(t=view.t())


@pytest.mark.parametrize("rank", range(6))
def test_indices_are_those_of_the_whole_tensor(rank):
    """FSDP2 over uneven tensor parallelism: a rank holds several intervals."""
    mesh, placements = Mesh((3, 2), tuple(range(6))), (Placement(0, 2), Placement(0))
    layout = SourceLayout(6, (mesh,), (placements,), (SourceTensor("w", (11, 4), "float32", 0, 0),))
    held = compute_shard_map((11, 4), mesh, placements)
    whole = torch.arange(44.0).view(11, 4)
    for shard in held.shards:
        if rank not in shard.ranks:
            continue
        local = torch.zeros(held.min_local_shape(rank))
        local[shard.local_start] = NAN
        told = not_finite(layout, [local], rank)
        assert told.endswith(f"index {shard.box.start}")
        assert f"trainer rank {rank}: 1 of" in told
        assert whole[shard.box.start] == shard.box.start[0] * 4 + shard.box.start[1]


@pytest.mark.parametrize("bad", [False, True])
def test_temporaries_stay_small(bad):
    n = 3 * finite.CHUNK
    tensors = {
        "contiguous": torch.zeros(n + 5),
        "half": torch.zeros(n, dtype=torch.bfloat16),
        "transposed": torch.zeros(1024, n // 1024).t(),
        "eight bits": torch.zeros(n, dtype=torch.float8_e4m3fn),
        "double": torch.zeros(n + 1, dtype=torch.float64),
    }
    if bad:
        tensors["transposed"][5, 3] = NAN
    state = describe(tensors.items(), trainer_rank=0, global_ranks=(0,))
    with LargestResult() as largest:
        told = not_finite(state.layout, state.shards, 0)
    assert (told is not None) == bad
    assert not bad or "index (5, 3)" in told
    assert largest.nbytes <= 8 * finite.CHUNK
