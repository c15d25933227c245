"""The calls of SGLang's former VerlEngine: what its users passed.

Each row of the table in docs/usage/migration.md is shown by a test, here or elsewhere, and its words are the code's.
"""

import dataclasses
import inspect
import re

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardedStateDictConfig, StateDictType
from torch.distributed.tensor import Shard, distribute_tensor

from sglang_reshard import SenderOptions, UpdateOptions, UpdateReport, VerlEngine, errors
from sglang_reshard.errors import Unsupported
from sglang_reshard.sources import describe
from support.documents import ROOT, table
from support.dtensors import as_rank
from support.toy import checkpoint
from support.toy_serving import serve
from support.world import run_world

ROWS = dict(table("docs/usage/migration.md", "## SGLang's former `VerlEngine`"))
HERE = "test/unit/test_former_verl_engine.py"
SHOWN = {  # by the first words of a row
    "`update_weights_from_tensor`": f"{HERE}::test_the_items_of_a_sharded_state_dict",
    "`load_format=`": f"{HERE}::test_a_load_format_is_refused",
    "the engine has as many": "test/engine/pairs/test_pairs.py::test_gpu_code_paths",
    '`backend="server"`': "test/engine/live/test_server.py::test_a_script_does_the_same_with_a_server",
    "`shutdown` ends": "test/unit/test_verl_engine.py::test_a_shutdown_ends_the_engine",
    "`list(state_dict.items())`": "test/unit/test_tied_heads.py::test_it_is_compared_in_every_update",
    "a call with a subset": "test/unit/test_kept.py::test_what_is_left_out_keeps_its_values",
    "a call for each bucket": f"{HERE}::test_the_items_of_a_sharded_state_dict",
    "an empty list": "test/unit/test_source_state.py::test_a_name_passed_twice_and_no_tensors_are_refused",
    "data parallel trainer ranks": f"{HERE}::test_an_engine_of_a_part_of_the_trainer_ranks",
    "the same with parameters": f"{HERE}::test_an_engine_of_a_part_of_the_trainer_ranks",
}


class Model(torch.nn.Module):
    """The toy's checkpoint, with a tied head."""

    def __init__(self, version):
        super().__init__()
        for name, tensor in checkpoint(version).items():
            module = torch.nn.Module()
            module.weight = torch.nn.Parameter(tensor.clone())
            self.add_module(name.removesuffix(".weight"), module)
        self.lm_head = torch.nn.Module()
        self.lm_head.weight = self.embed.weight


def train_fsdp1(trainer):
    """As the former test_verl_engine did: FSDP1, SHARDED_STATE_DICT, all items in one call; then once more."""
    mesh = init_device_mesh("cpu", (trainer.size,))
    engine = VerlEngine.__new__(VerlEngine)  # whose engine is behind `send`, without SGLang
    engine._sender = trainer.sender()
    for version in (1, 2):
        model = FullyShardedDataParallel(
            Model(version),
            device_mesh=mesh,
            device_id=torch.device("cpu"),
            use_orig_params=True,
            mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
        )
        sharded = ShardedStateDictConfig(offload_to_cpu=False)
        FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT, sharded)
        report = engine.update_weights_from_tensor(list(model.state_dict().items()), flush_cache=True)
        assert isinstance(report, UpdateReport)


def test_the_items_of_a_sharded_state_dict():
    _, found = run_world(2, 2, train_fsdp1, serve)
    assert found == [[1, 2]] * 2


def test_a_load_format_is_refused():
    with pytest.raises(Unsupported, match="load_format='direct'"):
        VerlEngine.__new__(VerlEngine).update_weights_from_tensor(checkpoint(1), load_format="direct")


@pytest.mark.parametrize("sharded_over", ["dp and tp", "tp"])
def test_an_engine_of_a_part_of_the_trainer_ranks(sharded_over):
    with as_rank(0, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        placed = (mesh["tp"], [Shard(0)]) if sharded_over == "tp" else (mesh, [Shard(0), Shard(0)])
        given = [("w", distribute_tensor(torch.arange(8.0), *placed, src_data_rank=None))]
        if sharded_over == "tp":
            state = describe(given, trainer_rank=0, global_ranks=(0, 1))
            assert state.shards[0].tolist() == [0, 1, 2, 3]
            return
        with pytest.raises(Unsupported, match=r"trainer ranks of this update hold only 4 of its 8 .* on all ranks"):
            describe(given, trainer_rank=0, global_ranks=(0, 1))


def test_every_row_is_shown_by_a_test():
    for row, (words, test) in zip(ROWS, SHOWN.items(), strict=True):
        path, name = test.split("::")
        assert row.startswith(words)
        assert f"def {name}" in (ROOT / path).read_text(), test


def test_arguments_and_methods_of_the_table_exist():
    """Options of `update` and of the constructor, methods, and classes."""
    known = {*inspect.signature(VerlEngine).parameters, *dir(VerlEngine)}
    known |= {field.name for options in (SenderOptions, UpdateOptions) for field in dataclasses.fields(options)}
    known |= {*dir(errors), "UpdateReport", "MultiEngineSender"}
    written = {code.split("=")[0].removesuffix("()") for now in ROWS.values() for code in re.findall(r"`([^`]+)`", now)}
    assert written - {"no tensors were passed", 'mesh["tp"]'} <= known
