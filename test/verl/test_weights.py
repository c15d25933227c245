"""The hooks in verl: what training engines hand out, and what becomes of what cannot be resharded."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_reshard.errors import Unsupported
from sglang_reshard.verl import server_adapter
from sglang_reshard.verl.hooks import around
from sglang_reshard.verl.training_engine_weights import TrainingEngineWeights, engine_of, install

GATHERED: list[str] = []
UNMERGED = {"module": SimpleNamespace(peft_config={}), "model_config": SimpleNamespace(lora={})}


def gathering() -> Iterator[tuple[str, int]]:
    GATHERED.append("w")
    yield "w", 1


class Stock:
    def double(self, number: int) -> int:
        return 2 * number


def test_a_method_is_wrapped_once() -> None:
    for _ in range(2):
        around(Stock, "double", lambda stock, self, number: stock(self, number) + 1)
    assert Stock().double(3) == 7


def test_weights_remember_their_engine_and_are_gathered_only_for_who_iterates() -> None:
    weights = TrainingEngineWeights("engine", gathering())
    assert engine_of(weights) == "engine"
    assert GATHERED == []
    assert list(weights) == [("w", 1)]
    assert GATHERED == ["w"]


def test_weights_that_do_not_say_are_refused() -> None:
    with pytest.raises(Unsupported, match="external_lib"):
        engine_of(gathering())


def test_every_training_engine_of_verls_hands_out_weights_that_remember_it() -> None:
    from verl.workers.engine import EngineRegistry

    install()
    for backends in EngineRegistry._engines.values():
        for engine in (engine for devices in backends.values() for engine in devices.values()):
            assert hasattr(engine.get_per_tensor_param, "_sglang_reshard"), engine


def adapter(**settings: Any) -> SimpleNamespace:
    checkpoint_engine = SimpleNamespace(backend="reshard", engine_kwargs={})
    config = SimpleNamespace(checkpoint_engine=checkpoint_engine, get=settings.get)
    return SimpleNamespace(config=config, _pd_role=settings.get("role"))


@pytest.mark.parametrize(
    ("settings", "engine", "peft", "why"),
    [
        ({}, {}, {"r": 8}, "unmerged LoRA adapters of SimpleNamespace"),
        ({"role": "prefill"}, {}, None, "rollout.disaggregation"),
        ({}, {"_qat_enabled": True}, None, "quantization-aware"),
        ({}, UNMERGED, None, "unmerged LoRA adapters of SimpleNamespace"),
    ],
)
def test_what_is_not_carried_takes_verls_own_path_and_a_warning_says_so(
    settings: dict[str, Any], engine: dict[str, Any], peft: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, warned = [], []
    # Not by what is logged in the end: other tests in this process set up logging as servers do.
    monkeypatch.setattr(server_adapter.logger, "warning", lambda *words: warned.append(words[0] % words[1:]))

    async def stock(_adapter: Any, weights: Any, **options: Any) -> None:
        taken.append((list(weights), options["global_steps"], options["peft_config"]))

    def sync(rollout: Any) -> None:
        weights = TrainingEngineWeights(SimpleNamespace(**engine), gathering())
        asyncio.run(server_adapter._update_weights(stock, rollout, weights, global_steps=7, peft_config=peft))

    rollout = adapter(**settings)
    sync(rollout)
    sync(rollout)
    assert taken == [([("w", 1)], 7, peft)] * 2
    assert [why in words for words in warned] == [True], "said once, by name"


def test_only_verls_own_fsdp_engines_are_read_by_their_dtensors() -> None:
    from torch.distributed.fsdp import FSDPModule
    from verl.workers.engine.fsdp import FSDPEngine, FSDPEngineWithLMHead

    from sglang_reshard.verl.fsdp import is_fsdp

    class Module(FSDPModule): ...

    class LikeVeOmni(FSDPEngine):
        def get_per_tensor_param_shard(self, **kwargs: Any) -> Any: ...

    def made(kind: type) -> Any:
        engine = object.__new__(kind)
        engine.module = object.__new__(Module)
        return engine

    assert is_fsdp(made(FSDPEngineWithLMHead))
    assert not is_fsdp(made(LikeVeOmni))
