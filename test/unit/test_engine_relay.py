"""Trainer rank 0 tells engines of each other; they offer their memory once, and again when anything has changed."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from sglang_reshard.api.multi_engine import MultiEngineSender
from sglang_reshard.control import ControlServer
from sglang_reshard.errors import Aborted, EngineRefused, Mismatch
from sglang_reshard.landings.base import Landing
from sglang_reshard.landings.shadow import Shadow
from sglang_reshard.protocol.messages import DistributedUpdateWeightsOutput, encode
from sglang_reshard.protocol.session import Session
from sglang_reshard.routes.base import EngineEnd
from sglang_reshard.routes.nixl.engine import NixlEngineEnd
from sglang_reshard.routes.relay import offers as relay_offers
from sglang_reshard.routes.relay.engine import RelayEngineEnd
from sglang_reshard.routes.relay.member import RelayMember
from sglang_reshard.routes.relay.offers import Offer, Relay, RelayOffers, make_offer
from sglang_reshard.trace.program import Program

TIMEOUT_S = 30.0


@pytest.fixture
def address():
    server = ControlServer.open("127.0.0.1")
    yield server.address
    server.close()


@pytest.fixture
def session(address):
    return Session.join(address, TIMEOUT_S)


FAILED = DistributedUpdateWeightsOutput(success=False, message="offloaded")


def test_one_that_says_nothing_is_given_up_by_all_alike(session, monkeypatch):
    monkeypatch.setattr(relay_offers, "_OFFER_S", 0.2)
    relay = Relay("relay/1", ("a", "b", "c"), 0, 1)
    for engine in (0, 2):
        make_offer(session, relay, engine, Offer(layout="l"))
    with ThreadPoolExecutor(3) as threads:
        seen = list(threads.map(lambda _: RelayOffers(session, relay, TIMEOUT_S).all(), range(3)))
    assert seen[0] == seen[1] == seen[2]
    assert [offer.error for offer in seen[0][1]] == ["", "it offered nothing within 0.2 s", ""]


def test_an_engine_hears_of_one_that_failed_before_its_offer(address):
    """Long before it gives up waiting. All later offers are under another prefix, and the earlier ones are gone."""
    sender = MultiEngineSender(address, trainer_rank=0, global_ranks=(0,), transport="nixl", relay=True)
    heard, left = [], []

    def fails(_request):
        return FAILED

    def waits(request):
        relay, session = Relay.of(request.around["relay"]), Session.join(request.address, TIMEOUT_S)
        offers = RelayOffers(session, relay, TIMEOUT_S)
        make_offer(session, relay, relay.own, Offer(digest := offers.put("a layout")))
        heard.append([offer.error for offer in offers.all()[1]])
        left.append(session.client.exists([f"relay/1/{name}" for name in ("offer/0", "offer/1", digest)]))
        return FAILED

    sender.set_engines({"a": fails, "b": waits})
    for _ in range(2):
        with pytest.raises(EngineRefused):
            sender.update({"weight": torch.zeros(2)})
    sender.close()
    assert heard == [["its update failed", ""]] * 2
    assert left == [[True] * 3, [False] * 3]


def test_an_abort_ends_the_wait_for_offers(session):
    reads = SimpleNamespace(timeout_s=TIMEOUT_S, tensor_index=SimpleNamespace(layout=SimpleNamespace(tensors=())))
    side = SimpleNamespace(reads=reads, live=Program((), {}), read_plans=("",))
    meeting = SimpleNamespace(session=session, scope="update/1", gather=lambda _, part: [part])
    session.client.enter(meeting.scope, "engine rank 0")
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(RelayMember(0).agree, meeting, side, Relay("relay/1", ("a", "b"), 0, 1))
        session.client.wait(["relay/1/offer/0"], TIMEOUT_S)
        session.client.cancel(meeting.scope, "the update was aborted")
        with pytest.raises(Aborted, match="the update was aborted"):
            waits.result(TIMEOUT_S / 3)  # less than it waits for an offer


@pytest.mark.parametrize(
    ("relay", "says"),
    [
        ({"own": 2}, "engine 2 of 2"),
        ({"engines": ("a",)}, r"length >= 2 - at `\$.engines`"),
        ({"update": 2**23}, r"`int` <= 8388607 - at `\$.update`"),
        ({"engines": ("a", "b" * 5000)}, r"length <= 4096 - at `\$.engines"),
        ({"own": "a"}, "invalid Relay message"),
    ],
)
def test_what_no_sender_asks_is_refused(relay, says):
    valid = {"offers": "relay/1", "engines": ("a", "b"), "own": 0, "update": 1}
    assert Relay.of(encode(Relay(**valid))) == Relay(**valid)
    with pytest.raises(Mismatch, match=says):
        Relay.of(encode(Relay(**{**valid, **relay})))


def test_only_live_weights_are_passed_on():
    program = Program((), {})
    side = SimpleNamespace(reads=SimpleNamespace(landing=Landing(program)))
    with pytest.raises(Mismatch, match="relay=True needs transport='nixl'"):
        RelayEngineEnd(side, None, EngineEnd())
    side.reads.landing = Landing(program, Shadow(program))
    with pytest.raises(Mismatch, match="relay=True needs transport='nixl' and staged=False"):
        RelayEngineEnd(side, None, NixlEngineEnd.__new__(NixlEngineEnd))
