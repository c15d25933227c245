"""`checkpoint_engine.engine_kwargs.reshard`: what may be set, and that a mistake there is an error at once."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from sglang_reshard.errors import ReshardError
from sglang_reshard.trainer.options import SenderOptions, UpdateOptions
from sglang_reshard.verl.settings import Settings


def test_what_hydra_hands_over_is_read() -> None:
    given = OmegaConf.create({"transport": "p2p", "bucket_bytes": "1000000", "timeout": 60, "ignore": ["model.mtp.*"]})
    given.frozen = ["*.k_proj.weight"]
    settings = Settings.of(given)
    assert settings == Settings(
        SenderOptions(transport="p2p", bucket_bytes=1_000_000, timeout_s=60.0),
        UpdateOptions(ignore=("model.mtp.*",), frozen=("*.k_proj.weight",)),
    )


def test_nothing_need_be_set() -> None:
    config = OmegaConf.create({"engine_kwargs": {}})
    assert Settings.of_rollout(config) == Settings()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"transprt": "p2p"}, ["transprt", "The settings are transport, bucket_bytes"]),
        ({"transport": "rdma"}, ["rdma", "ipc"]),
        ({"verify": "finite"}, ["finite", "verify"]),
        ({"bucket_bytes": "much"}, ["bucket_bytes"]),
        ({"bucket_bytes": 0}, ["bucket_bytes=0", "positive"]),
        ({"delta": "auto", "transport": "ipc"}, ["engine_kwargs.reshard: delta='auto'", "transport='auto'"]),
        ({"relay": True}, ["transport='nixl'"]),
        ({"timeout": -1}, ["timeout_s=-1", "positive"]),
    ],
)
def test_a_mistake_is_refused_by_name(given: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ReshardError) as refused:
        Settings.of(given)
    assert all(word in str(refused.value) for word in words), str(refused.value)
