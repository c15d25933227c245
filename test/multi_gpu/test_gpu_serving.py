"""What a training loop does around updates: requests that run, verification, mistakes, sleep, its own collectives."""

from __future__ import annotations

from statistics import fmean

import pytest
import torch
import torch.distributed as dist

from configurations import DEVICE, GPUS, LARGEST, LAYOUTS, TRAINERS, Engine, engines
from judged_engine import ENDLESS, PROMPT, JudgedEngine
from sglang_reshard.errors import ReshardError
from sglang_reshard.routes.p2p.trainer import P2pTrainerEnd

FSDP = LAYOUTS["fsdp"]
COLLECTIVES = 50


def large(engine: Engine) -> bool:
    return engine.tp_size == LARGEST


def serving(engine: Engine) -> bool:
    return large(engine) and engine.generates


EVERY = pytest.mark.parametrize("live", engines(large), indirect=True)
SERVING = pytest.mark.parametrize("live", engines(serving), indirect=True)


@SERVING
def test_a_running_request_ends_with_the_weights_that_it_began_with(live: JudgedEngine) -> None:
    """On a GPU the tokens come out of CUDA graphs, which were captured before the first update."""
    trainer = live.trainer(FSDP)
    with live.sender() as sender:
        live.update(sender, trainer, "a")
        request = live.begin_request()
        live.update(sender, trainer, "b", staged=True)
    said = live.say()
    if live.first:
        assert live.sglang.server_args.disable_cuda_graph == (GPUS == 0)
        assert request.end() == (live.said["a"], "length")
        assert said == live.said["b"]


@SERVING
def test_a_running_request_is_aborted_if_that_is_asked_for(live: JudgedEngine) -> None:
    trainer, version = live.trainer(FSDP), live.another_version()
    request = live.begin_request(ENDLESS)
    with live.sender() as sender:
        live.update(sender, trainer, version, abort_all_requests=True)
    said = live.say()
    if live.first:
        tokens, reason = request.end()
        assert reason == "abort"
        assert len(tokens) < ENDLESS
        assert said == live.said[version]


@EVERY
@pytest.mark.parametrize("verify", ["sample", "full"])
def test_received_weights_are_verified(live: JudgedEngine, verify: str) -> None:
    with live.sender() as sender:
        report = live.update(sender, live.trainer(FSDP), live.another_version(), verify=verify)
    assert report.verified == verify


@EVERY
def test_a_mistake_of_one_rank_is_told_to_all_and_writes_nothing(live: JudgedEngine) -> None:
    trainer = live.trainer(FSDP)
    with live.sender() as sender:
        live.update(sender, trainer, "a")
        trainer.become("b")
        named = dict(trainer.named)
        if dist.get_rank() == TRAINERS - 1:
            named["model.norm.weight"] = torch.zeros(7, device=DEVICE)
        with pytest.raises(ReshardError, match=r"model\.norm\.weight"):
            sender.update(list(named.items()))
        live.assert_has("a")


@EVERY
def test_a_rank_that_fails_while_it_sends_aborts_the_update_which_the_next_one_repairs(
    live: JudgedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    if live.configuration.shares_gpus:
        pytest.skip("trainer ranks send nothing to an engine on their GPUs: the engine `apart` is sent to")
    trainer = live.trainer(FSDP)
    with live.sender(transport="p2p") as sender:
        live.update(sender, trainer, "a")
        trainer.become("b")
        with monkeypatch.context() as patch:
            if dist.get_rank() == TRAINERS - 1:
                patch.setattr(P2pTrainerEnd, "start", _stumble)
            with pytest.raises(ReshardError, match="stumbled"):
                sender.update(list(trainer.named.items()))
        live.update(sender, trainer, "b")


def _stumble(*_: object) -> None:
    raise OSError("the trainer rank stumbled")


@EVERY
def test_weights_that_were_released_are_all_brought_again(live: JudgedEngine) -> None:
    """A trainer that shares the GPUs puts the engine to sleep while it trains."""
    trainer = live.trainer(FSDP)
    with live.sender() as sender:
        live.update(sender, trainer, "a")
        live.on_engine("release_memory_occupation", ["kv_cache", "weights"])
        trainer.become("b")
        with pytest.raises(ReshardError):
            sender.update(list(trainer.named.items()))
        live.on_engine("resume_memory_occupation", ["weights"])
        live.update(sender, trainer, "b", unmap_after=True)
        live.on_engine("resume_memory_occupation", ["kv_cache"])
    if live.first and live.configuration.generates:
        assert live.say() == live.said["b"]


@EVERY
def test_the_trainers_own_collectives_run_beside_an_update(live: JudgedEngine) -> None:
    """All-reduces on another stream, while another thread updates the engine from a copy of the shards."""
    trainer, version = live.trainer(FSDP), live.another_version()
    gradient = torch.empty(1 << 16, device=DEVICE)
    trainer.become(version)
    stream = torch.cuda.Stream() if GPUS else None
    with live.sender() as sender:
        handle = sender.update_async(list(trainer.named.items()), weight_version=live.name_of(version))
        with torch.cuda.stream(stream):
            for _ in range(COLLECTIVES):
                gradient.fill_(1)
                dist.all_reduce(gradient)
        trainer.become("c")  # the optimizer's step
        handle.wait()
    live.assert_has(version)
    live.version = version
    assert gradient.eq(TRAINERS).all()


@SERVING
def test_log_probabilities_are_those_of_transformers(live: JudgedEngine) -> None:
    with live.sender() as sender:
        live.update(sender, live.trainer(FSDP), "a")
    if live.first:
        said = live.say_with_log_probs(16)
        assert _difference(live, "a", said) < 0.05 < 1 < _difference(live, "b", said)


def _difference(live: JudgedEngine, version: str, said: list[tuple[float, int]]) -> float:
    """Returns how far, on average, log-probabilities are from those of transformers with a version of the weights."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(live.checkpoint(version), dtype=torch.float32)
    tokens = torch.tensor([PROMPT + [token for _, token in said]])
    with torch.no_grad():
        rows = model(tokens).logits[0].log_softmax(-1)[len(PROMPT) - 1 : -1]
    return fmean(abs(float(row[token]) - log_prob) for row, (log_prob, token) in zip(rows, said, strict=True))
