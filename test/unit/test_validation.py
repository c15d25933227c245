"""What other processes say: how it travels, and the numbers in it. What is wrong is refused, in words that say so."""

import time
import zlib

import msgspec
import pytest
from msgspec.structs import replace

from sglang_reshard.control import Address
from sglang_reshard.delta.section import DeltaSection
from sglang_reshard.errors import Mismatch
from sglang_reshard.gpu.device import RankDevice
from sglang_reshard.layout.manifest import inflate, pack_blob, unpack_blob
from sglang_reshard.protocol.messages import LoraAdapter, PrepareSend, Relay
from sglang_reshard.protocol.validation import check_handles, check_layout, check_prepare_send, check_request
from sglang_reshard.sources import SourceLayout
from sglang_reshard.transports.memory import Handles, ShardView, ShmStorage
from support.plans import tensor_parallel

BIG = 1 << 62


def test_what_was_packed_is_unpacked():
    layout = tensor_parallel(2, [(4, 3), (5,)], [0, -1])
    digest, blob = pack_blob(layout)
    assert unpack_blob(blob, SourceLayout, digest) == layout == unpack_blob(blob, SourceLayout)


@pytest.mark.parametrize(
    ("spoiled", "says"),
    [
        (lambda blob: blob[:-1], "cut short"),
        (lambda blob: blob + b"x", "something follows it"),
        (lambda blob: b"", "cut short"),
        (lambda blob: b"not zlib", "damaged"),
        (lambda blob: zlib.compress(msgspec.msgpack.encode("other")), "content hash"),
        (lambda blob: zlib.compress(bytes(20_000)), "more than 10,000 bytes"),
    ],
)
def test_another_blob_in_its_place_is_refused(spoiled, says):
    digest, blob = pack_blob(tensor_parallel(2, [(4, 3)], [0]))
    with pytest.raises(Mismatch, match=f"the source layout .*{says}"):
        unpack_blob(spoiled(blob), SourceLayout, digest, what="the source layout", max_bytes=10_000)


def test_a_small_blob_of_gigabytes_takes_no_memory():
    bomb = zlib.compress(bytes(1 << 26))
    assert len(bomb) < 1 << 17
    with pytest.raises(Mismatch, match="more than 1,000 bytes"):
        inflate(bomb, 1000)


@pytest.mark.parametrize(
    "raw",
    [
        b"\x81\xa1y" + b"\x91" * 10_000 + b"\x01",  # nested deeper than anybody recurses
        b"\x81\xa2\xff\xfe\x01",  # no UTF-8
        msgspec.msgpack.encode({"trainer_ranks": "two"}),
        b"\xdd\xff\xff\xff\xff",  # four thousand million elements, it says
    ],
)
def test_what_is_no_manifest_is_refused(raw):
    with pytest.raises(Mismatch, match="cannot be read"):
        unpack_blob(zlib.compress(raw), SourceLayout)


# -- requests and commands

PREPARE = PrepareSend("route", ("a", "b"), ((0, 16), (32, 0)), "gloo", 5.0, ((0, 3), (1, 2)))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"round_bytes": ((0, 16),)}, "for 1 trainer ranks, and there are 2"),
        ({"round_bytes": ((0, 16), (1,))}, "trainer rank 1 has 1 sizes of a round for 2 engine ranks"),
        ({"read_plans": ("a",)}, "trainer rank 0 has 2 sizes of a round for 1 engine ranks"),
        ({"round_bytes": ((0, -16), (1, 0))}, "a size of a round of trainer rank 0"),
        ({"round_bytes": ((0, BIG), (1, 0))}, "a size of a round of trainer rank 0"),
        ({"groups": ()}, "trainer rank 0 and engine rank 1 are in no communicator together"),
        ({"groups": ((0, 2), (1, 3))}, "trainer rank 0 and engine rank 1 are in no communicator together"),
        ({"groups": ((0, 3), (1, 2), ())}, "3 communicators for 2 engine ranks"),
        ({"groups": ((0, 3), ())}, "trainer rank 1 and engine rank 0 are in no communicator together"),
        ({"groups": ((3, 0), (1, 2))}, "not in ascending order"),
        ({"groups": ((0, 0, 3), (1, 2))}, "not in ascending order"),
        ({"groups": ((0, 3, BIG), (1, 2))}, "members that are not ranks"),
        ({"groups": ((-1, 0, 3), (1, 2))}, "members that are not ranks"),
        ({"groups": ((0, 1, 2, 3), (1, 2))}, "engine rank 0 is a member of several communicators"),
        ({"groups": ((0, 1, 3), (1, 2))}, "communicator 0 has members that neither send nor receive"),
        ({"round_bytes": ((0, 16), (0, 0))}, "communicator 1 has members that neither send nor receive"),
        ({"round_bytes": ((0, 16), (0, 0)), "groups": ((0, 3), ())}, "communicator 1 has members that neither"),
        ({"backend": "mpi"}, "is not gloo, nccl or nixl"),
        ({"timeout_s": float("nan")}, "timeout_s=nan"),
        ({"timeout_s": 0.0}, "timeout_s=0.0"),
        ({"transfer": "x" * 5000}, "more than 4,096 characters"),
    ],
)
def test_a_command_that_is_not_valid_is_refused(changes, says):
    check_prepare_send(PREPARE, 2)
    with pytest.raises(Mismatch, match=says):
        check_prepare_send(replace(PREPARE, **changes), 2)


RELAY = Relay(Address("s", "h", 1, "0" * 64), ("a", "b"), 0, 1)


class Request(msgspec.Struct, frozen=True):
    """The fields of a request that are looked at."""

    update: int = 1
    layout: str = "l"
    handles: tuple[str, ...] = ("a", "b")
    trainer_hosts: tuple[str, ...] = ("h", "h")
    trainer_devices: tuple[RankDevice, ...] = ()
    prepared: tuple[str, ...] = ()
    weight_version: str | None = None
    transport: str = "auto"
    bucket_bytes: int = 1
    timeout_s: float = 1.0
    ignore: tuple[str, ...] = ()
    apart: dict[str, str] = {}
    frozen: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    staged: bool = False
    lora: LoraAdapter | None = None
    relay: Relay | None = None
    sections: tuple[dict[int, DeltaSection], ...] = ()
    package_version: str = ""
    traceparent: str = ""


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"handles": ("a",)}, "2 trainer hosts, 1 memory handles"),
        ({"handles": (), "trainer_hosts": ()}, "0 trainer hosts"),
        ({"prepared": ("r",)}, "1 prepared transfers"),
        ({"trainer_devices": (RankDevice(),)}, "1 trainer devices"),
        ({"trainer_devices": (RankDevice("x" * 5000),) * 2}, "a name of 5,000 characters"),
        ({"update": -1}, "the update number -1"),
        ({"bucket_bytes": 0}, "bucket_bytes=0 "),
        ({"bucket_bytes": BIG}, "bucket_bytes="),
        ({"timeout_s": float("inf")}, "timeout_s=inf"),
        ({"timeout_s": -1.0}, "timeout_s=-1.0"),
        ({"ignore": ("x" * 5000,)}, "a name of 5,000 characters"),
        ({"apart": {"x" * 5000: ""}}, "a name of 5,000 characters"),
        ({"apart": {"x": "y" * 5000}}, "a name of 5,000 characters"),
        ({"frozen": ("x" * 5000,)}, "a name of 5,000 characters"),
        ({"only": ("x" * 5000,)}, "a name of 5,000 characters"),
        ({"lora": LoraAdapter("policy", "x" * 5000)}, "a name of 5,000 characters"),
        ({"relay": RELAY}, "no others"),
        ({"relay": RELAY, "transport": "nixl", "staged": True}, "no others"),
        ({"relay": replace(RELAY, engines=("a",)), "transport": "nixl"}, "engine 0 of 1"),
        ({"relay": replace(RELAY, own=2), "transport": "nixl"}, "engine 2 of 2"),
        ({"relay": replace(RELAY, update=0), "transport": "nixl"}, "the update number 0"),
        ({"relay": replace(RELAY, engines=("a", "x" * 5000)), "transport": "nixl"}, "the name of an engine"),
        ({"sections": ({},)}, "deltas of 1 trainer ranks, expected 0 or 2"),
        ({"sections": ({}, {0: DeltaSection(1, -1)})}, "has -1 bytes, and may have 0 to"),
        ({"sections": ({}, {0: DeltaSection(1, 8, "FILE")})}, "kind 'FILE'"),
        ({"sections": ({}, {0: DeltaSection(1, 8, "DRAM", 0, -8)})}, "at address -8"),
        ({"sections": ({}, {0: DeltaSection(1, 8, "DRAM", 0, (1 << 64) - 8)})}, "which cannot exist"),
    ],
)
def test_a_request_that_no_sender_makes_is_refused(changes, says):
    check_request(Request())
    check_request(Request(transport="nixl", relay=RELAY))
    with pytest.raises(Mismatch, match=says):
        check_request(replace(Request(), **changes))


def test_the_checks_of_a_hundred_thousand_tensors_take_seconds_at_most():
    """They run once a session; a check that goes through tensors times ranks would take minutes."""
    count, ranks = 100_000, 64
    layout = tensor_parallel(ranks, [(64, 16), (128,)] * (count // 2), [0, -1] * (count // 2))
    views = tuple(ShardView(i % 8, 0, (16, 1) if i % 2 == 0 else (1,)) for i in range(count))
    handles = Handles(tuple(ShmStorage(1, fd, 1, 4096) for fd in range(8)), views)
    started = time.process_time()
    check_layout(layout, ranks)
    check_handles(handles, layout, 5)
    assert time.process_time() - started < 5
