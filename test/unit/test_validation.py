"""What other processes say: how it travels, and the numbers in it. What is wrong is refused, in words that say so."""

import time
import zlib

import msgspec
import pytest
from msgspec.structs import replace

from sglang_reshard.control import Address
from sglang_reshard.errors import Mismatch
from sglang_reshard.gpu.rank_info import RankGpuInfo
from sglang_reshard.layout.content_addressed import pack_blob, unpack_blob
from sglang_reshard.memory.mapping import Handles, ShardView, ShmStorage
from sglang_reshard.observability.probe_report import ProbeSummary
from sglang_reshard.protocol.messages import (
    DistributedUpdateWeightsReq,
    LoraAdapter,
    Prepare,
    PullWeightsReq,
    SharedWeights,
    ShareWeightsReq,
    encode,
)
from sglang_reshard.protocol.validation import (
    check_handles,
    check_layout,
    check_prepare,
    check_probe_summary,
    check_pull_request,
    check_request,
    check_share_request,
    check_shared_weights,
)
from sglang_reshard.routes import trainer_end
from sglang_reshard.routes.delta.offer import DeltaOffer, offered_sections
from sglang_reshard.routes.nixl.remote_shards import RemoteShard, RemoteShards
from sglang_reshard.routes.nixl.validation import check_remote_shards
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
PREPARE = Prepare("transfer", "p2p", b"", 5.0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"round_bytes": ((0, 16),)}, "lists 1 trainer ranks, expected 2"),
        ({"round_bytes": ((0, 16), (1,))}, r"round_bytes\[1\] has 1 entries, expected 2"),
        ({"read_plans": ("a",)}, r"round_bytes\[0\] has 2 entries, expected 1"),
        ({"round_bytes": ((0, -16), (1, 0))}, r"round_bytes\[0\] has an entry out of range"),
        ({"round_bytes": ((0, BIG), (1, 0))}, r"round_bytes\[0\] has an entry out of range"),
        ({"groups": ()}, "trainer rank 0 sends to engine rank 1, but no communicator"),
        ({"groups": ((0, 2), (1, 3))}, "trainer rank 0 sends to engine rank 1, but no communicator"),
        ({"groups": ((0, 3), (1, 2), ())}, "3 communicators for 2 engine ranks"),
        ({"groups": ((0, 3), ())}, "trainer rank 1 sends to engine rank 0, but no communicator"),
        ({"groups": ((3, 0), (1, 2))}, "not in ascending order"),
        ({"groups": ((0, 0, 3), (1, 2))}, "not in ascending order"),
        ({"groups": ((0, 3, BIG), (1, 2))}, "members out of range"),
        ({"groups": ((-1, 0, 3), (1, 2))}, "members out of range"),
        ({"groups": ((0, 1, 2, 3), (1, 2))}, "engine rank 0 is a member of several communicators"),
        ({"groups": ((0, 1, 3), (1, 2))}, "communicator 0 has members that neither send nor receive"),
        ({"round_bytes": ((0, 16), (0, 0))}, "communicator 1 has members that neither send nor receive"),
        ({"round_bytes": ((0, 16), (0, 0)), "groups": ((0, 3), ())}, "communicator 1 has members that neither"),
        ({"read_plans": ("x" * 5000, "b")}, "more than 4,096 characters"),
        ({"backend": "mpi"}, "is neither gloo nor nccl"),
    ],
)
def test_what_no_engine_asks_of_those_that_send_is_refused(changes, says):
    ASK.check(2)
    links = {name: value for name, value in changes.items() if name in ("read_plans", "round_bytes")}
    others = {name: value for name, value in changes.items() if name not in links}
    with pytest.raises(Mismatch, match=says):
        replace(ASK, links=replace(ASK.links, **links), **others).check(2)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"timeout_s": float("nan")}, "timeout_s=nan"),
        ({"timeout_s": 0.0}, "timeout_s=0.0"),
        ({"transfer": "x" * 5000}, "a text of 5,000 characters"),
        ({"route": "x" * 5000}, "a text of 5,000 characters"),
    ],
)
def test_a_command_that_is_not_valid_is_refused(changes, says):
    check_prepare(PREPARE)
    with pytest.raises(Mismatch, match=says):
        check_prepare(replace(PREPARE, **changes))


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
        ({"prepared": ("r",)}, "1 prepared transfers"),
        ({"trainer_devices": (RankGpuInfo(),)}, "1 trainer devices"),
        ({"trainer_devices": (RankGpuInfo("x" * 5000),) * 2}, "a text of 5,000 characters"),
        ({"update": -1}, "the update number -1"),
        ({"update": 1 << 64}, "the update number 18,446,744,073,709,551,616"),
        ({"update": 10**5000}, "the update number of 16,610 bits"),
        ({"engine": -1}, "the engine number -1"),
        ({"engine": 1 << 64}, "the engine number 18,446"),
        ({"stock_changes": 1 << 64}, "the stock number 18,446"),
        ({"transport": "carrier pigeon"}, "transport 'carrier pigeon' is not one of"),
        ({"transport": "x" * 5000}, "a text of 5,000 characters"),
        ({"address": replace(ADDRESS, session="s" * 513)}, "a session name of 513"),
        ({"address": replace(ADDRESS, host="")}, "a host of 0"),
        ({"address": replace(ADDRESS, host="h\0")}, "a null character"),
        ({"address": replace(ADDRESS, key="")}, "the key of its address is not 64 hexadecimal digits"),
        ({"address": replace(ADDRESS, key="g" * 64)}, "the key of its address is not 64 hexadecimal digits"),
        ({"ignore": ("x",) * 70_000}, "70,000 names or patterns"),
        ({"trainer_devices": (RankGpuInfo(visible=("",) * 2000),) * 2}, "more than 1,024 visible GPUs"),
        ({"publication": -1}, "the publication number -1"),
        ({"publication": BIG}, "the publication number "),
        ({"bucket_bytes": 0}, "bucket_bytes=0 "),
        ({"bucket_bytes": BIG}, "bucket_bytes="),
        ({"timeout_s": float("inf")}, "timeout_s=inf"),
        ({"timeout_s": float("nan")}, "timeout_s=nan"),
        ({"timeout_s": 0.0}, "timeout_s=0.0"),
        ({"timeout_s": 1e-9}, "timeout_s=1e-09"),
        ({"timeout_s": 1e308}, r"timeout_s=1e\+308"),
        ({"timeout_s": -1.0}, "timeout_s=-1.0"),
        ({"ignore": ("x" * 5000,)}, "a text of 5,000 characters"),
        ({"apart": {"x" * 5000: ""}}, "a text of 5,000 characters"),
        ({"apart": {"x": "y" * 5000}}, "a text of 5,000 characters"),
        ({"frozen": ("x" * 5000,)}, "a text of 5,000 characters"),
        ({"only": ("x" * 5000,)}, "a text of 5,000 characters"),
        ({"merged": ("x" * 5000,)}, "a text of 5,000 characters"),
        ({"lora": LoraAdapter("policy", "x" * 5000)}, "a text of 5,000 characters"),
        ({"around": {str(n): b"" for n in range(17)}}, "around has 17 routes"),
        ({"around": {"relay": bytes(1 << 25)}}, "exceeds the size limit"),
        ({"around": {"x" * 5000: b""}}, "a text of 5,000 characters"),
        ({"offers": ({},)}, "offers has 1 entries, expected 0 or 2"),
        ({"offers": ({1 << 64: b""}, {})}, "an engine rank outside 0 to"),
        ({"offers": ({}, {-1: b""})}, "an engine rank outside 0 to"),
        ({"offers": ({0: bytes(1 << 25)}, {})}, "or exceeds"),
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
    with pytest.raises(Mismatch, match="the delta of trainer rank 1 for engine rank 3 is out of range"):
        offered_sections(replace(request, offers=({}, {3: encode(offered)})))


PULL = PullWeightsReq(url="http://gpu7:30000")
SHARE = ShareWeightsReq(package_version="1")
HELD = RemoteShard("DRAM", 0, 1 << 40, (64, 1))
REMOTE = RemoteShards(b"", (HELD, RemoteShard("VRAM", 7, 0, ()), RemoteShard("", 0, 0, ())))


def check_remote(shards):
    check_remote_shards(shards, 3, "trainer rank 3")


def second(*shard):
    return {"shards": (HELD, RemoteShard(*shard), HELD)}


@pytest.mark.parametrize(
    ("check", "valid", "changes", "says"),
    [
        (check_pull_request, PULL, {"timeout_s": 0.0}, "timeout_s=0.0"),
        (check_pull_request, PULL, {"timeout_s": 3601.0}, "timeout_s=3601.0"),
        (check_pull_request, PULL, {"bucket_bytes": 1 << 64}, "bucket_bytes=18,446"),
        (check_pull_request, PULL, {"transport": "none"}, "is not one of"),
        (check_pull_request, PULL, {"url": "u" * 5000}, "a text of 5,000 characters"),
        (check_pull_request, PULL, {"api_key": "a\r\nb"}, "characters that an HTTP header cannot carry"),
        (check_pull_request, PULL, {"admin_api_key": "\u00e9"}, "characters that an HTTP header cannot carry"),
        (check_share_request, SHARE, {"timeout_s": float("nan")}, "timeout_s=nan"),
        (check_share_request, SHARE, {"bucket_bytes": -1}, "bucket_bytes=-1"),
        (check_share_request, SHARE, {"package_version": "1" * 5000}, "a text of 5,000 characters"),
        (check_share_request, SHARE, {"address": replace(ADDRESS, key="")}, "64 hexadecimal digits"),
        (check_shared_weights, SharedWeights(ADDRESS, "7", "", "float32"), {"digest": "<html>"}, "16 hexadecimal"),
        (check_shared_weights, SharedWeights(ADDRESS, "7", "0" * 16, "float32"), {"version": "x" * 5000}, "a text of"),
        (check_probe_summary, ProbeSummary("passed", 0.5, None, 1.0), {"seconds": float("nan")}, "invalid probe"),
        (check_probe_summary, ProbeSummary("passed", 0.5, None, 1.0), {"mean_difference": -1.0}, "invalid probe"),
        (check_remote, REMOTE, {"shards": (HELD,)}, "describes 1 shards in registered memory, expected 3"),
        (check_remote, REMOTE, second("FILE", 0, 0, ()), "trainer rank 3 says that its shard number 1 .*kind 'FILE'"),
        (check_remote, REMOTE, second("DRAM", -1, 0, ()), "GPU -1"),
        (check_remote, REMOTE, second("DRAM", 0, -8, ()), "at address -8"),
        (check_remote, REMOTE, second("DRAM", 0, (1 << 64) - 8, ()), "at address"),
        (check_remote, REMOTE, second("DRAM", 0, 0, (-1, 1)), "strides"),
        (check_remote, REMOTE, second("DRAM", 0, 0, (1 << 60,)), "strides"),
        (check_remote, REMOTE, second("DRAM", 0, 0, (1,) * 40), "strides"),
    ],
)
def test_requests_and_answers_of_servers_are_refused_unless_they_can_be_used(check, valid, changes, says):
    check(valid)
    with pytest.raises(Mismatch, match=says):
        check(replace(valid, **changes))


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
