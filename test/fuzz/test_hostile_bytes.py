"""Arbitrary bytes and arbitrary values for everything that is sent: decoded to the same again, or refused."""

import contextlib
import inspect

import msgspec
import pytest

from fuzz.arbitrary import changed, damaged, value_of
from fuzz.settings import fuzzed
from sglang_reshard.errors import Mismatch, ReshardError
from sglang_reshard.landings.checked.regions import RegionSet
from sglang_reshard.layout.decoders import inflate, pack_blob, unpack_blob
from sglang_reshard.memory.mapping import Handles
from sglang_reshard.plan import RankDemand
from sglang_reshard.protocol import messages
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq, decode, encode
from sglang_reshard.protocol.validation import check_request
from sglang_reshard.routes.p2p.messages import SendRequest
from sglang_reshard.sources import SourceLayout

WORDS = tuple(
    kind
    for _, kind in sorted(inspect.getmembers(messages, inspect.isclass))
    if issubclass(kind, msgspec.Struct) and kind is not msgspec.Struct
)
MANIFESTS = (SourceLayout, Handles, SendRequest, RankDemand, RegionSet)
REFUSALS = (ReshardError, msgspec.MsgspecError)


def same(one, other):
    """Equal, where NaN is NaN."""
    return encode(one) == encode(other)


def refused_or_means_something(data, kind):
    try:
        value = decode(data, kind)
    except REFUSALS:
        return
    assert same(decode(encode(value), kind), value)


def test_there_is_something_to_send():
    assert {"DistributedUpdateWeightsReq", "Prepare", "Outcome", "TrainerStatus"} <= {kind.__name__ for kind in WORDS}


@fuzzed
def test_arbitrary_values_arrive_as_they_are(random):
    kind = random.choice(WORDS + MANIFESTS)
    value = value_of(kind, random)
    assert same(decode(encode(value), kind), value)
    digest, blob = pack_blob(value)
    assert same(unpack_blob(blob, kind, digest), value)


@fuzzed
def test_damaged_bytes_are_refused_or_mean_something(random):
    kind = random.choice(WORDS + MANIFESTS)
    data = damaged(encode(value_of(kind, random)), random)
    refused_or_means_something(data, random.choice((kind, random.choice(WORDS + MANIFESTS))))


@fuzzed
def test_arbitrary_bytes_are_refused_or_mean_something(random):
    refused_or_means_something(random.randbytes(random.choice((0, 1, 2, 9, 40))), random.choice(WORDS + MANIFESTS))


@fuzzed
def test_changed_values_are_refused_or_arrive_as_they_are(random):
    kind = random.choice(WORDS + MANIFESTS)
    refused_or_means_something(encode(changed(value_of(kind, random), random)), kind)


@fuzzed
def test_a_damaged_blob_is_refused_or_has_the_same_content(random):
    kind = random.choice(MANIFESTS)
    value = value_of(kind, random)
    digest, blob = pack_blob(value)
    try:
        arrived = unpack_blob(damaged(blob, random), kind, digest)
    except Mismatch:
        return
    assert same(arrived, value)  # some bits of a zlib stream say nothing of its content


@fuzzed
def test_a_blob_of_other_content_is_refused(random):
    kind = random.choice(MANIFESTS)
    value = value_of(kind, random)
    other = changed(value, random)
    digest, _ = pack_blob(value)
    other_digest, blob = pack_blob(other)
    if digest != other_digest:
        with pytest.raises(Mismatch, match="does not match its content hash"):
            unpack_blob(blob, kind, digest)


@fuzzed
def test_what_is_unpacked_is_never_more_than_is_allowed(random):
    size = random.choice((0, 1, 100, 5000))
    _, blob = pack_blob(bytes(size))
    most = random.choice((0, 1, 50, 200, 6000))
    with contextlib.suppress(Mismatch):
        assert len(inflate(damaged(blob, random) if random.random() < 0.5 else blob, most)) <= most


@fuzzed
def test_a_request_is_refused_or_makes_sense(random):
    request = value_of(DistributedUpdateWeightsReq, random)
    try:
        check_request(request)
    except Mismatch:
        return
    assert len(request.handles) == len(request.trainer_hosts) >= 1
    assert 0 < request.timeout_s < float("inf")
    assert request.bucket_bytes >= 1
