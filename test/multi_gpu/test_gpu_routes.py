"""Every route brings what SGLang's own load brings: from any layout of the trainer, into any engine."""

from __future__ import annotations

import pytest

from configurations import LARGEST, LAYOUTS, ROUTES, SENDING, engines, routes
from judged_engine import JudgedEngine
from sglang_reshard.errors import Unsupported


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("live", engines(), indirect=True)
def test_a_route_brings_what_a_stock_load_brings(live: JudgedEngine, layout: str, route: str) -> None:
    """Twice: the second update plans nothing. Of a delta only the second one sends changes."""
    if route in SENDING and live.configuration.shares_gpus:
        pytest.skip("NCCL accepts a GPU once in a communicator: the engine `apart` takes this route")
    trainer = live.trainer(LAYOUTS[layout])
    versions = ("b", "c") if route == "delta" else ("a", "b")
    with live.sender(**ROUTES[route]) as sender:
        first, second = (live.update(sender, trainer, version) for version in versions)
    asked = ROUTES[route]["transport"]
    assert asked == "auto" or first.transport == second.transport == asked
    assert (first.delta, second.delta) == (False, route == "delta")
    assert "plan" in first.seconds
    assert "plan" not in second.seconds


@pytest.mark.parametrize("live", engines(lambda engine: engine.name == f"tp{LARGEST}"), indirect=True)
def test_what_nccl_would_not_connect_is_refused_and_old_weights_stay(live: JudgedEngine) -> None:
    if not live.configuration.shares_gpus:
        pytest.skip("only NCCL refuses ranks that share a GPU")
    trainer = live.trainer(LAYOUTS["tp"])
    with live.sender(transport="auto") as sender:
        live.update(sender, trainer, "a")
    trainer.become("b")
    with live.sender(transport="p2p") as sender, pytest.raises(Unsupported, match="share one GPU"):
        sender.update(list(trainer.named.items()))
    live.assert_has("a")
