"""Where another rank says that its registered memory is: what cannot exist is refused, naming the rank."""

import pytest

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.routes.nixl.reader import NixlReader
from sglang_reshard.routes.nixl.remote_shards import RemoteShard, RemoteShards, check_remote_shards

RIGHT = RemoteShard("DRAM", 0, 1 << 40, (64, 1))


def check(*shards: RemoteShard, count: int = 1) -> None:
    check_remote_shards(RemoteShards(b"", shards), count, "trainer rank 3")


def test_what_ranks_publish_is_right() -> None:
    check(RIGHT, RemoteShard("VRAM", 7, 0, ()), RemoteShard("", 0, 0, ()), count=3)


@pytest.mark.parametrize(
    ("shard", "why"),
    [
        (RemoteShard("FILE", 0, 0, ()), "kind 'FILE'"),
        (RemoteShard("DRAM", -1, 0, ()), "GPU -1"),
        (RemoteShard("DRAM", 0, -8, ()), "at address -8"),
        (RemoteShard("DRAM", 0, (1 << 64) - 8, ()), "at address"),
        (RemoteShard("DRAM", 0, 0, (-1, 1)), "strides"),
        (RemoteShard("DRAM", 0, 0, (1 << 60,)), "strides"),
        (RemoteShard("DRAM", 0, 0, (1,) * 40), "strides"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_memory_that_cannot_exist_is_refused(shard: RemoteShard, why: str) -> None:
    with pytest.raises(Mismatch, match=f"trainer rank 3 says that its shard number 1 .*{why}"):
        check(RIGHT, shard, count=2)


def test_other_numbers_of_shards_are_refused() -> None:
    with pytest.raises(Mismatch, match="describes 1 shards in registered memory, expected 2"):
        check(RIGHT, count=2)


def test_without_nixl_the_error_says_what_to_install_and_where() -> None:
    with pytest.raises(Unsupported, match=r"NIXL cannot be imported on .* pip install 'sglang-reshard\[nixl\]'"):
        NixlReader(0)
