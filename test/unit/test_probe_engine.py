"""What a probe asks of an engine, and which answers it does not take."""

import math
import threading
import time

import msgspec
import pytest

from sglang_reshard.errors import Unsupported
from sglang_reshard.extras.probe.engine import Expected, NotProbed, ProbedEngine
from sglang_reshard.protocol.weights_info import WeightsInfo
from support.probed import SEQUENCES, TRAINER, Engine, EngineWithInfo

UPDATE = Expected("ab12", 3, "7")
INFO = WeightsInfo(version="7", package_version="1", session="ab12", update=3)


def ask(engine, expected=UPDATE, timeout_s=30.0):
    return ProbedEngine(engine).logprobs(SEQUENCES, expected, timeout_s)


def test_an_engine_is_asked_for_the_whole_prompt_at_temperature_1():
    engine = EngineWithInfo(info=INFO, weight_version="7", cached_tokens=0)
    assert ask(engine) == (TRAINER,)
    (asked,) = engine.asked
    assert (asked["return_logprob"], asked["logprob_start_len"]) == (True, 0)
    assert asked["sampling_params"]["temperature"] == 1.0
    assert asked.keys() == {"input_ids", "return_logprob", "logprob_start_len", "sampling_params"}
    assert ask(Engine().generate) == (TRAINER,), "a function will do"


def test_every_data_parallel_rank_is_asked():
    engine = EngineWithInfo(info=msgspec.structs.replace(INFO, data_parallel_ranks=3))
    assert ask(engine) == (TRAINER,) * 3
    assert [asked["routed_dp_rank"] for asked in engine.asked] == [0, 1, 2]


def test_an_adapter_is_asked_for_by_name_and_its_update_is_not_the_model_s():
    engine = EngineWithInfo(info=INFO)
    assert ask(engine, Expected("ab12/lora/policy", 1, "7", "policy")) == (TRAINER,)
    assert engine.asked[0]["lora_path"] == "policy"


def test_no_number_over_http_is_none():
    assert math.isnan(ask(Engine(((None, -2.0), (-0.5,))))[0][0][0])


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        (EngineWithInfo(info=msgspec.structs.replace(INFO, paused=True)), "generation is paused"),
        (EngineWithInfo(info=msgspec.structs.replace(INFO, under_way=True)), "another update has begun"),
        (EngineWithInfo(info=msgspec.structs.replace(INFO, torn="half")), "torn: half"),
        (EngineWithInfo(info=msgspec.structs.replace(INFO, update=4)), "no longer those of this update"),
        (EngineWithInfo(info=msgspec.structs.replace(INFO, session="", update=0)), "no longer those of this update"),
        (EngineWithInfo(info=[INFO, msgspec.structs.replace(INFO, version="8")]), "while the probe was running"),
        (Engine(weight_version="8"), "answered with version '8', not '7'"),
        (Engine(cached_tokens=2), "2 tokens of sequence 0 from its prefix cache"),
        (Engine(((-1.0,), (-0.5,))), "2 of 3 tokens of sequence 0"),
        (Engine(finish_reason={"type": "abort", "message": "too long"}), "aborted sequence 0: too long"),
        (Engine(input_token_logprobs=None), "0 of 3 tokens"),
        (lambda **_: [], "0 answers for 2 sequences"),
        (lambda **_: 1 / 0, "request to the engine failed: ZeroDivisionError"),
    ],
)
def test_why_an_engine_could_not_be_probed_is_told(engine, says):
    with pytest.raises(NotProbed, match=says):
        ask(engine)


def test_an_engine_that_does_not_answer_is_not_waited_for():
    released = threading.Event()
    began = time.monotonic()
    with pytest.raises(NotProbed, match=r"did not answer within 0.05 s"):
        ask(lambda **_: released.wait(30), timeout_s=0.05)
    assert time.monotonic() - began < 10
    released.set()


def test_what_cannot_be_asked_is_refused():
    with pytest.raises(Unsupported, match=r"Probe\(engine=\.\.\.\)"):
        ProbedEngine(None)
