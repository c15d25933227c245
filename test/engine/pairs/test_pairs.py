"""Any trainer mesh into any engine: hypothesis draws pairs, real processes reshard, every live tensor is compared.

An engine rank here is a real SGLang model and the real receiver, without a scheduler. Updates go into live memory
that was full of garbage, in buckets from one byte to all in one: two from the same shards, one after the trainer
has sharded anew. Stock loads of the same weights into the same model are what they have to equal, bit by bit.

SGLANG_RESHARD_SWEEP=1 draws many more, other ones each time; a failure prints the pair.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings

from pair_host import PairHost
from pairs import Pair, pairs, tp_to_tp

SWEEP = bool(os.environ.get("SGLANG_RESHARD_SWEEP"))
pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600 if SWEEP else 1800)]

bounded = settings(
    max_examples=300 if SWEEP else 4,
    derandomize=not SWEEP,
    deadline=None,  # a pair has its own, in its host
    database=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink] if SWEEP else [Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
FSDP_OVER_TP = Pair(
    "dense", (2, 2), (("X0", "S0"), ("S0", "S1"), ("S0", "R")), False, "float32", "bfloat16", 4, 1, 4096
)
EXPERTS = Pair("experts", (3,), (("S0",), ("S1",), ()), True, "bfloat16", "float32", 4, 2, 512)
LATENT = Pair("latent", (3, 2), (("X1", "S1"), ("-", "S0"), ()), False, "float32", "bfloat16", 2, 2, 100)


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PairHost]:
    with PairHost("gpu", tmp_path_factory.mktemp("models")) as host:
        yield host


@pytest.fixture(scope="module")
def cpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PairHost]:
    with PairHost("cpu", tmp_path_factory.mktemp("models")) as host:
        yield host


def assert_exact(host: PairHost, pair: Pair) -> None:
    found = host.run(pair)
    for engine_rank in found["engines"]:
        assert engine_rank["differing"] == [[], [], []]
        assert all(engine_rank["changed"])
        assert engine_rank["same_addresses"]
    for trainer_rank in found["trainers"]:
        first, second, third = trainer_rank["phases"]
        assert {"trace", "plan", "connect"} <= set(first)
        assert not {"trace", "plan", "connect"} & set(second)
        assert {"plan", "connect"} <= set(third)


@bounded
@given(pair=pairs((1, 2, 4)))
@example(pair=tp_to_tp(3, 4))
@example(pair=tp_to_tp(6, 4, bucket_bytes=7))
@example(pair=tp_to_tp(5, 2, "tied", bucket_bytes=1))
@example(pair=FSDP_OVER_TP)
@example(pair=EXPERTS)
@example(pair=LATENT)
def test_gpu_code_paths(gpu: PairHost, pair: Pair) -> None:
    assert_exact(gpu, pair)


@bounded
@given(pair=pairs((1, 2, 3, 4)))
@example(pair=tp_to_tp(3, 4))
@example(pair=tp_to_tp(2, 3, bucket_bytes=7))
@example(pair=LATENT)
@example(pair=msgspec.structs.replace(FSDP_OVER_TP, transport="nixl"))
def test_cpu_code_paths(cpu: PairHost, pair: Pair) -> None:
    assert_exact(cpu, pair)


def test_one_wrong_element_is_noticed(gpu: PairHost) -> None:
    for engine_rank in gpu.run(tp_to_tp(2, 2), spoiled=True)["engines"]:
        assert engine_rank["differing"] == [[], [], ["model.norm.weight"]]
