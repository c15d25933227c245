"""What a scheduler of a prefill or a decode server knows of requests that are on both."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_reshard.control import Address
from sglang_reshard.patches import prefill_decode
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq
from sglang_reshard.testing import cpu_host

pytestmark = [pytest.mark.engine]
REQUEST = DistributedUpdateWeightsReq(
    address=Address("s", "127.0.0.1", 9, "0" * 64), update=1, layout="l", handles=("h",), trainer_hosts=("x",)
)


def a_scheduler(mode: str, idle: bool = True, **queues: int) -> Any:
    """`idle`: as SGLang sees it. `queues`: how many requests wait in which."""
    waiting = {name: [object()] * queues.get(name, 0) for name in ("bootstrap", "inflight", "room", "retracted", "kv")}
    return SimpleNamespace(
        server_args=SimpleNamespace(disaggregation_mode=mode),
        disagg_prefill_bootstrap_queue=SimpleNamespace(queue=waiting["bootstrap"]),
        disagg_prefill_inflight_queue=waiting["inflight"],
        disagg_decode_prealloc_queue=SimpleNamespace(queue=waiting["room"], retracted_queue=waiting["retracted"]),
        disagg_decode_transfer_queue=SimpleNamespace(queue=waiting["kv"]),
        offload_tags=set(),
        draft_worker=None,
        waiting_queue=[],
        running_batch=SimpleNamespace(reqs=[], filter_batch=lambda: None),
        last_batch=None,
        is_fully_idle=lambda: idle,
    )


def refused(of: Any) -> str:
    """Why the scheduler refuses the update. Its module imports SGLang."""
    cpu_host.activate(tp_size=1)
    from sglang_reshard.patches import scheduler

    return scheduler._refusal(of, REQUEST, writes=True)


@pytest.mark.parametrize(
    ("mode", "queues", "number"),
    [
        ("null", {}, 0),
        ("prefill", {"bootstrap": 2, "inflight": 1}, 3),
        ("decode", {"room": 1, "kv": 2}, 3),
        ("decode", {"retracted": 1}, 1),
    ],
)
def test_requests_between_the_servers_are_counted(mode: str, queues: dict[str, int], number: int) -> None:
    assert prefill_decode.between_servers(a_scheduler(mode, **queues)) == number


def test_a_retracted_request_keeps_cache_of_the_old_weights_where_no_flush_reaches_it() -> None:
    """SGLang 0.5.12 calls such a decode server idle."""
    refusal = refused(a_scheduler("decode", idle=True, retracted=1))
    assert "0 requests are running, and 1 are between the prefill and the decode server" in refusal
    assert "Pause both with mode='abort'" in refusal
    assert refused(a_scheduler("decode")) == ""


def test_a_server_for_both_names_all_ways_out() -> None:
    refusal = refused(a_scheduler("null", idle=False))
    for way in ("mode='abort'", "mode='retract'", "abort_all_requests=True", "flush_cache='by_version'"):
        assert way in refusal
