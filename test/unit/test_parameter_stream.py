"""Parameters that a trainer broadcasts one by one, or in buckets: the engine has all of a version, or none of it.

The broadcast itself is real in test/engine/live/test_server.py; here what it brings is put into its place.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_reshard.errors import Mismatch
from sglang_reshard.extras import parameter_stream
from sglang_reshard.extras.parameter_stream import ParameterStream, buckets, packed
from support.toy import checkpoint
from support.toy_serving import serve
from support.world import run_world

ENGINES = 2


def stream(trainer: Any) -> dict[str, Any]:
    end = ParameterStream(trainer.send, timeout_s=30, transport="ipc")
    seen: dict[str, Any] = {"received": []}
    with pytest.raises(Mismatch, match="call init_broadcast_group first"):
        end.update_broadcast(1, "norm.weight", "float32", (16,))
    end._group = trainer.group
    arriving: list[torch.Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parameter_stream.dist, "broadcast", lambda tensor, *_: tensor.copy_(arriving.pop(0)))

        def send(version: int, bucket: list[tuple[str, torch.Tensor]]) -> None:
            arriving.append(packed(bucket))
            names = [name for name, _ in bucket]
            end.update_broadcast_bucket(version, names, [t.dtype for _, t in bucket], [t.shape for _, t in bucket])

        for version, size in ((1, 0), (2, 2000), (3, 1 << 20)):
            for bucket in buckets(list(checkpoint(version).items()), size):
                send(version, bucket)
            report = end.commit(version, verify="full")
            seen["received"].append(("plan" in report.seconds, report.weight_version))
        with pytest.raises(Mismatch, match="version 3 is incomplete: 8 parameters have not arrived, embed"):
            end.commit(3)
        for version in (4, 5):  # the fifth gives up the fourth, and is not complete either
            name, tensor = next(iter(checkpoint(version).items()))
            arriving.append(tensor)
            end.update_broadcast(version, name, "torch.float32", tensor.shape)
        with pytest.raises(Mismatch, match=r"version 4 is incomplete"):
            end.commit(4)
        with pytest.raises(Mismatch, match=r"version 5 is incomplete: 7 parameters have not arrived, q\.weight, "):
            end.commit(5)
        with pytest.raises(Mismatch, match="'float33' is not a torch dtype"):
            end.update_broadcast(5, name, "float33", tensor.shape)
    seen["bytes"] = end.nbytes
    end._group = None
    end.close()
    return seen


def test_an_engine_has_whole_versions() -> None:
    (told,), seen = run_world(1, ENGINES, stream, serve)
    assert seen == [[1, 2, 3]] * ENGINES
    assert told["received"] == [(True, "1"), (False, "2"), (False, "3")], "planned once"
    assert told["bytes"] == sum(tensor.nbytes for tensor in checkpoint(1).values())


@given(
    sizes=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 40)), max_size=20),
    bucket_bytes=st.integers(1, 200),
    by_module=st.booleans(),
)
def test_buckets_are_all_parameters_in_order(sizes: list[tuple[str, int]], bucket_bytes: int, by_module: bool) -> None:
    named = [(f"model.{of}.p{n}.weight", torch.arange(size)) for n, (of, size) in enumerate(sizes)]
    found = list(buckets(named, bucket_bytes, by_module=by_module))
    assert [name for bucket in found for name, _ in bucket] == [name for name, _ in named]
    for bucket in found:
        assert len(bucket) == 1 or sum(tensor.nbytes for _, tensor in bucket) <= bucket_bytes
        assert not by_module or len({name.split(".")[1] for name, _ in bucket}) == 1
        if len(bucket) > 1:
            assert torch.equal(packed(bucket).view(torch.int64), torch.cat([tensor for _, tensor in bucket]))
