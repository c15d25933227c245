"""What other processes say: how it travels, and the numbers in it. What is wrong is refused, in words that say so."""

import time
import zlib

import msgspec
import pytest
from msgspec.structs import replace

from sglang_reshard.control import Address
from sglang_reshard.errors import Mismatch
from sglang_reshard.gpu.rank_info import RankGpuInfo
from sglang_reshard.layout.decoders import pack_blob, unpack_blob
from sglang_reshard.memory.mapping import Handles, ShardView, ShmStorage
from sglang_reshard.observability.probe_report import ProbeSummary
from sglang_reshard.protocol.messages import (
    DistributedUpdateWeightsReq,
    LoraAdapter,
    Prepare,
    PullWeightsReq,
    SharedWeights,
    ShareWeightsReq,
    decode,
    encode,
)
from sglang_reshard.protocol.validation import (
    check_handles,
    check_layout,
    check_pull_request,
    check_request,
)
from sglang_reshard.routes import trainer_end
from sglang_reshard.routes.delta.offer import DeltaOffer, offered_sections
from sglang_reshard.routes.nixl.remote_shards import RemoteShard, RemoteShards, check_remote_shards
from sglang_reshard.routes.p2p.ask import Links, P2pAsk
from sglang_reshard.sources import SourceLayout
from support.plans import tensor_parallel

BIG = 1 << 62


@pytest.mark.parametrize(
    ("spoiled", "says"),
    [
        (lambda blob: blob[:-1], "it is truncated"),
        (lambda blob: blob + b"x", "has data after its end"),
        (lambda blob: b"", "it is truncated"),
        (lambda blob: b"not zlib", "damaged"),
        (lambda blob: zlib.compress(msgspec.msgpack.encode("other")), "content hash"),
        (lambda blob: zlib.compress(bytes(20_000)), "more than 10,000 bytes"),
    ],
)
def test_another_blob_in_its_place_is_refused(spoiled, says):
    digest, blob = pack_blob(tensor_parallel(2, [(4, 3)], [0]))
    with pytest.raises(Mismatch, match=f"the source layout .*{says}"):
        unpack_blob(spoiled(blob), SourceLayout, digest, what="the source layout", max_bytes=10_000)


# -- requests and commands

ASK = P2pAsk(Links(("a", "b"), ((0, 16), (32, 0))), "gloo", ((0, 3), (1, 2)))
TOO_LONG = r"`str` of length <= 4096 - at `(key` in `)?\$."
PREPARE = Prepare("transfer", "p2p", b"", 5.0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"round_bytes": ((0, 16),)}, "lists 1 trainer ranks, expected 2"),
        ({"round_bytes": ((0, 16), (1,))}, r"round_bytes\[1\] has 1 entries, expected 2"),
        ({"read_plans": ("a",)}, r"round_bytes\[0\] has 2 entries, expected 1"),
        ({"round_bytes": ((0, -16), (1, 0))}, r"`int` >= 0 - at `\$.links.round_bytes"),
        ({"round_bytes": ((0, BIG), (1, 0))}, r"`int` <= \d+ - at `\$.links.round_bytes"),
        ({"groups": ()}, "no communicator has engine rank 0 and those"),
        ({"groups": ((0, 2), (1, 3))}, r"communicator 0, \(0, 2\), are not .* \[1, 2\]"),
        ({"groups": ((0, 3), (1, 2), ())}, r"communicator 2, \(\), are not"),
        ({"groups": ((0, 3), ())}, r"communicator 1, \(\), are not"),
        ({"groups": ((3, 0), (1, 2))}, r"communicator 0, \(3, 0\), are not .* \[0, 3\]"),
        ({"groups": ((0, 3, 3), (1, 2))}, r"communicator 0, \(0, 3, 3\), are not .* \[0, 3\]"),
        ({"groups": ((0, 1, 2, 3), (1, 2))}, r"communicator 1, \(1, 2\), are not"),
        ({"round_bytes": ((0, 16), (0, 0))}, r"communicator 1, \(1, 2\), are not .* \[\]"),
        ({"read_plans": ("x" * 5000, "b")}, r"`str` of length <= 4096 - at `\$.links.read_plans"),
        ({"backend": "mpi"}, r"at `\$.backend`"),
    ],
)
def test_what_no_engine_asks_of_those_that_send_is_refused(changes, says):
    ASK.check(2)
    links = {name: value for name, value in changes.items() if name in ("read_plans", "round_bytes")}
    others = {name: value for name, value in changes.items() if name not in links}
    with pytest.raises(Mismatch, match=says):
        decode(encode(replace(ASK, links=replace(ASK.links, **links), **others)), P2pAsk).check(2)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"timeout_s": float("nan")}, r"`float` >= 0.001 - at `\$.timeout_s`"),
        ({"timeout_s": 0.0}, r"`float` >= 0.001 - at `\$.timeout_s`"),
        ({"transfer": "x" * 5000}, TOO_LONG + "transfer`"),
        ({"route": "x" * 5000}, TOO_LONG + "route`"),
    ],
)
def test_a_command_that_is_not_valid_is_refused(changes, says):
    assert decode(encode(PREPARE), Prepare) == PREPARE
    with pytest.raises(Mismatch, match=f"invalid Prepare message: Expected {says}"):
        decode(encode(replace(PREPARE, **changes)), Prepare)


def test_a_route_that_does_not_exist_is_refused():
    with pytest.raises(Mismatch, match="no route is called 'pigeons'"):
        trainer_end(None, replace(PREPARE, route="pigeons"))


ADDRESS = Address("s", "h", 1, "0" * 64)
REQUEST = DistributedUpdateWeightsReq(
    address=ADDRESS, update=1, layout="l", handles=("a", "b"), trainer_hosts=("h", "h"), bucket_bytes=1, timeout_s=1.0
)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"handles": ("a",)}, "2 trainer hosts, 1 memory handles"),
        ({"handles": (), "trainer_hosts": ()}, "0 trainer hosts"),
        ({"prepared": "r" * 5000}, TOO_LONG),
        ({"trainer_devices": (RankGpuInfo(),)}, "1 trainer devices"),
        ({"trainer_devices": (RankGpuInfo("x" * 5000),) * 2}, TOO_LONG),
        ({"update": -1}, r"`int` >= 0 - at `\$.update`"),
        ({"update": 1 << 62}, r"`int` <= \d+ - at `\$.update`"),
        ({"update": 10**5000}, "can't serialize ints"),
        ({"engine": -1}, r"`int` >= 0 - at `\$.engine`"),
        ({"engine": 1 << 62}, r"at `\$.engine`"),
        ({"stock_changes": 1 << 62}, r"at `\$.stock_changes`"),
        ({"transport": "carrier pigeon"}, "transport 'carrier pigeon' is not one of"),
        ({"transport": "x" * 5000}, "is not one of"),
        ({"address": replace(ADDRESS, session="s" * 513)}, r"`str` of length <= 512 - at `\$.address.session`"),
        ({"address": replace(ADDRESS, host="")}, r"at `\$.address.host`"),
        ({"address": replace(ADDRESS, host="h\0")}, r"at `\$.address.host`"),
        ({"address": replace(ADDRESS, key="")}, r"at `\$.address.key`"),
        ({"address": replace(ADDRESS, key="g" * 64)}, r"at `\$.address.key`"),
        ({"ignore": ("x",) * 70_000}, r"`array` of length <= 65536 - at `\$.ignore`"),
        ({"trainer_devices": (RankGpuInfo(visible=("",) * 2000),) * 2}, r"at `\$.trainer_devices\[\d\].visible`"),
        ({"publication": -1}, r"at `\$.publication`"),
        ({"publication": BIG}, r"at `\$.publication`"),
        ({"bucket_bytes": 0}, r"`int` >= 1 - at `\$.bucket_bytes`"),
        ({"bucket_bytes": BIG}, r"`int` <= 1099511627776 - at `\$.bucket_bytes`"),
        ({"timeout_s": float("inf")}, "timeout_s=inf exceeds this engine's limit"),
        ({"timeout_s": float("nan")}, r"at `\$.timeout_s`"),
        ({"timeout_s": 0.0}, r"`float` >= 0.001 - at `\$.timeout_s`"),
        ({"timeout_s": 1e308}, r"timeout_s=1e\+308"),
        ({"ignore": ("x" * 5000,)}, TOO_LONG),
        ({"apart": {"x" * 5000: ""}}, TOO_LONG),
        ({"apart": {"x": "y" * 5000}}, TOO_LONG),
        ({"lora": (LoraAdapter("policy", "x" * 5000),)}, TOO_LONG),
        ({"around": {str(n): b"" for n in range(17)}}, r"`object` of length <= 16 - at `\$.around`"),
        ({"around": {"relay": bytes(1 << 25)}}, r"`bytes` of length <= 16777216 - at `\$.around"),
        ({"around": {"x" * 5000: b""}}, TOO_LONG),
        ({"offers": ({},)}, "and 1 offers; all must have one entry per trainer rank"),
        ({"offers": ({1 << 16: b""}, {})}, r"`int` <= 65535 - at `key` in `\$.offers"),
        ({"offers": ({}, {-1: b""})}, r"`int` >= 0 - at `key` in `\$.offers"),
        ({"offers": ({0: bytes(1 << 25)}, {})}, r"of length <= 16777216 - at `\$.offers"),
    ],
)
def test_a_request_that_no_sender_makes_is_refused(changes, says):
    check_request(REQUEST)
    check_request(replace(REQUEST, offers=({0: encode(DeltaOffer(1, 2))}, {}), around={"delta": b""}))
    with pytest.raises(Mismatch, match=says):
        check_request(replace(REQUEST, **changes))


@pytest.mark.parametrize(
    "offered",
    [
        DeltaOffer(1, -1),
        DeltaOffer(-1, 1),
        DeltaOffer(1, 1 << 62),
        DeltaOffer(1, 1, gpu=-1),
        DeltaOffer(1, 1, address=1 << 63),
        DeltaOffer(1, 1, kind="FILE"),
    ],
)
def test_a_delta_that_no_trainer_rank_offers_is_refused(offered):
    request = replace(REQUEST, offers=({}, {3: encode(DeltaOffer(1, 2, kind="DRAM", address=4096))}))
    assert offered_sections(request) == {3: {1: DeltaOffer(1, 2, kind="DRAM", address=4096)}}
    with pytest.raises(Mismatch, match="the delta of trainer rank 1 for engine rank 3 is invalid"):
        offered_sections(replace(request, offers=({}, {3: encode(offered)})))


PULL = PullWeightsReq(url="http://gpu7:30000")
SHARE = ShareWeightsReq(package_version="1")
SHARED = SharedWeights(ADDRESS, "7", "0" * 16, "float32")
PROBE = ProbeSummary("passed", 0.5, None, 1.0)
HELD = RemoteShard("DRAM", 0, 1 << 40, (64, 1))
REMOTE = RemoteShards(b"", (HELD, RemoteShard("VRAM", 7, 0, ()), RemoteShard("", 0, 0, ())))


@pytest.mark.parametrize(
    ("shards", "says"),
    [
        ((HELD,), "describes 1 shards in registered memory, expected 3"),
        *(
            ((HELD, RemoteShard(*shard), HELD), says)
            for shard, says in (
                (("FILE", 0, 0, ()), r"at `\$.shards\[1\]\[0\]`"),
                (("DRAM", -1, 0, ()), r"`int` >= 0 - at `\$.shards\[1\]\[1\]`"),
                (("DRAM", 0, -8, ()), r"`int` >= 0 - at `\$.shards\[1\]\[2\]`"),
                (("DRAM", 0, (1 << 64) - 8, ()), r"at `\$.shards\[1\]\[2\]`"),
                (("DRAM", 0, 0, (-1, 1)), r"at `\$.shards\[1\]\[3\]"),
                (("DRAM", 0, 0, (1 << 60,)), r"at `\$.shards\[1\]\[3\]"),
                (("DRAM", 0, 0, (1,) * 40), r"at `\$.shards\[1\]\[3\]"),
            )
        ),
    ],
)
def test_registered_memory_that_cannot_be_is_refused(shards, says):
    check_remote_shards(decode(encode(REMOTE), RemoteShards), 3, "trainer rank 3")
    with pytest.raises(Mismatch, match=says):
        check_remote_shards(decode(encode(replace(REMOTE, shards=shards)), RemoteShards), 3, "trainer rank 3")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"timeout_s": 0.0}, r"`float` >= 0.001 - at `\$.timeout_s`"),
        ({"timeout_s": 3601.0}, r"`float` <= 3600.0 - at `\$.timeout_s`"),
        ({"bucket_bytes": 1 << 63}, r"at `\$.bucket_bytes`"),
        ({"transport": "none"}, "is not one of"),
        ({"verify": "all"}, "verify='all' is not one of"),
        ({"url": "u" * 5000}, TOO_LONG),
        ({"api_key": "a\r\nb"}, "characters that an HTTP header cannot carry"),
        ({"admin_api_key": "\u00e9"}, "characters that an HTTP header cannot carry"),
    ],
)
def test_a_pull_that_no_server_can_use_is_refused(changes, says):
    check_pull_request(PULL)
    with pytest.raises(Mismatch, match=says):
        check_pull_request(replace(PULL, **changes))


@pytest.mark.parametrize(
    ("valid", "changes", "field"),
    [
        (SHARE, {"timeout_s": float("nan")}, "timeout_s"),
        (SHARE, {"bucket_bytes": -1}, "bucket_bytes"),
        (SHARE, {"package_version": "1" * 5000}, "package_version"),
        (SHARE, {"address": replace(ADDRESS, key="")}, "address.key"),
        (SHARED, {"digest": "<html>"}, "digest"),
        (SHARED, {"version": "x" * 5000}, "version"),
        (PROBE, {"seconds": float("nan")}, "seconds"),
        (PROBE, {"mean_difference": -1.0}, "mean_difference"),
    ],
)
def test_what_servers_cannot_use_of_others_is_refused_as_it_is_decoded(valid, changes, field):
    assert decode(encode(valid), type(valid)) == valid
    with pytest.raises(Mismatch, match=rf"at `\$.{field}`"):
        decode(encode(replace(valid, **changes)), type(valid))


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
