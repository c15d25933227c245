"""The digests of stock loading, taken without an engine, are those of a live engine's ranks."""

import pytest

from sglang_reshard.cli.plan.forked_jobs import ChildFailed
from sglang_reshard.testing import cpu_host
from support.checkpoints import write_checkpoint
from tools.oracle.digests import LOADER, read_live_digests
from tools.oracle.stock import stock_digests

pytestmark = pytest.mark.engine


def test_stock_digests_are_a_live_engines(tmp_path):
    first = write_checkpoint("Qwen3ForCausalLM", tmp_path / "first", seed=1)
    second = write_checkpoint("Qwen3ForCausalLM", tmp_path / "second", seed=2)
    ranks_done = []
    stock = stock_digests(first, [first, second], tp_size=2, on_rank=ranks_done.append)
    assert sorted(ranks_done) == [0, 1]
    assert stock[0][0] != stock[1][0]
    assert stock[0][0] != stock[0][1]

    cpu_host.activate(tp_size=2)
    import sglang

    from sglang_reshard.patches.engine import end

    engine = sglang.Engine(
        **cpu_host.engine_arguments(
            model_path=first,
            tp_size=2,
            skip_tokenizer_init=True,
            custom_weight_loader=[LOADER],
            log_level="error",
        )
    )
    try:
        live = read_live_digests(engine, tmp_path / "digests")
        assert live == [stock[0][rank] for rank in range(2)]
        assert engine.update_weights_from_disk(second)[0]
        assert read_live_digests(engine, tmp_path / "digests") == [stock[1][rank] for rank in range(2)]
    finally:
        end(engine)


def test_what_goes_wrong_in_a_child_is_told(tmp_path):
    folder = write_checkpoint("Qwen3ForCausalLM", tmp_path / "model", seed=1)
    with pytest.raises(ChildFailed, match="no safetensors"):
        stock_digests(folder, [tmp_path / "nothing"], tp_size=1)
