"""The calls of SGLang's former VerlEngine: what its users passed, on a tied and an untied model.

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
from sglang_reshard.api.weight_sender import WeightSender
from sglang_reshard.engine.receiver import WeightReceiver
from sglang_reshard.engine.targets import TracedModel
from sglang_reshard.errors import ReshardError, Unsupported
from support.documents import ROOT, table
from support.toy import VOCAB, ToyRank, checkpoint
from support.world import run_world

ROWS = dict(table("docs/usage/migration.md", "## SGLang's former `VerlEngine`"))
SHOWN = {
    "the engine has as many ranks as the mesh": "test/engine/pairs/test_pairs.py::test_gpu_code_paths",
    '`backend="server"` starts a server': "test/engine/live/test_server.py::test_a_script_does_the_same_with_a_server",
    "`shutdown` ends every child of the process": "test/unit/test_verl_engine.py::test_a_shutdown_ends_the_engine",
}


def shows(*rows):
    """The test shows what rows of the table say."""

    def mark(test):
        SHOWN.update(dict.fromkeys(rows, f"test/unit/test_former_verl_engine.py::{test.__name__}"))
        return test

    return mark


def words(row):
    """What a row sets as code: arguments, exceptions, messages."""
    return [code.split("=")[0] for code in re.findall(r"`([^`]+)`", ROWS[row])]


WHOLE = "`update_weights_from_tensor` gathers every parameter on every rank"
ITEMS = "`list(state_dict.items())` of FSDP1 with `SHARDED_STATE_DICT`, tied head included"
LOAD_FORMAT = "`load_format=`"
SUBSET = "a call with a subset of the names updates those"
BUCKETS = "a call for each bucket of parameters, `flush_cache=True` with the last one"
NOTHING = "an empty list only flushes the cache"
OVER_ALL = (
    'data parallel trainer ranks with an engine for each `mesh["tp"]`, parameters sharded over all of them (FSDP)'
)
OVER_TP = 'the same with parameters sharded over `mesh["tp"]` alone (DDP, tensor parallel)'

HEAD, EMBEDDING = "lm_head.weight", "embed.weight"


class UntiedRank(ToyRank):
    """An engine rank with a head of its own."""

    def __init__(self, rank, size):
        super().__init__(rank, size)
        self.lm_head = torch.nn.Parameter(torch.zeros(VOCAB, 16), requires_grad=False)

    def load_weights(self, weights):
        given = dict(weights)
        if HEAD in given:
            self.lm_head.data.copy_(given.pop(HEAD))
        super().load_weights(given.items())


RANKS = {"tied": ToyRank, "untied": UntiedRank}


def state_of(version, kind):
    weights = checkpoint(version)
    weights[HEAD] = weights[EMBEDDING] if kind == "tied" else checkpoint(version + 100)[EMBEDDING]
    return weights


def engine_over(group, send):
    """A VerlEngine whose engine is behind `send`, without SGLang."""
    engine = VerlEngine.__new__(VerlEngine)
    engine._sender = WeightSender.over(group, send, timeout_s=30)
    return engine


def serve(rank, size, requests, kind, *_):
    """Answers updates. Returns after each the versions of all parameters, None where it is no version's."""
    model, found = RANKS[kind](rank, size), []
    model.load_weights(state_of(0, kind).items())
    receiver = WeightReceiver(TracedModel(model), rank, size, torch.device("cpu"))
    for request in requests:
        requests.answer(receiver.update(request))
        found.append({version_of(model, kind, name) for name, _ in model.named_parameters()})
    return found


def version_of(model, kind, name):
    for version in range(4):
        stock = RANKS[kind](model.rank, model.size)
        stock.load_weights(state_of(version, kind).items())
        if torch.equal(getattr(model, name), getattr(stock, name)):
            return version
    return None


class Model(torch.nn.Module):
    def __init__(self, version, kind):
        super().__init__()
        for name, tensor in state_of(version, kind).items():
            module = torch.nn.Module()
            module.weight = torch.nn.Parameter(tensor.clone())
            self.add_module(name.removesuffix(".weight"), module)
        if kind == "tied":
            self.lm_head.weight = self.embed.weight


def told_by(update):
    try:
        report = update()
        assert isinstance(report, UpdateReport)
        return report.success
    except ReshardError as error:
        return f"{type(error).__name__}: {error}"


def train_fsdp1(trainer, kind, given):
    """As the former test_verl_engine did: FSDP1, SHARDED_STATE_DICT, all items in one call; then once more."""
    mesh = init_device_mesh("cpu", (trainer.size,))
    engine = engine_over(trainer.group, trainer.send)
    told = []
    for version in (1, 2):
        model = FullyShardedDataParallel(
            Model(version, kind),
            device_mesh=mesh,
            device_id=torch.device("cpu"),
            use_orig_params=True,
            mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
        )
        sharded = ShardedStateDictConfig(offload_to_cpu=False)
        FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT, sharded)
        state = model.state_dict()
        named = {"items": list(state.items()), "dict": state, "module": model}[given]
        told.append(told_by(lambda named=named: engine.update_weights_from_tensor(named)))
    engine._sender.close()
    return told


@shows(WHOLE, ITEMS)
@pytest.mark.parametrize(("kind", "given"), [("tied", "items"), ("untied", "dict"), ("tied", "module")])
def test_the_items_of_a_sharded_state_dict(kind, given):
    told, found = run_world(2, 2, train_fsdp1, serve, kind, given)
    assert told == [[True, True]] * 2
    assert found == [[{1}, {2}]] * 2


def train_untied_for_a_tied_engine(trainer, _):
    engine = engine_over(trainer.group, trainer.send)
    mesh = init_device_mesh("cpu", (trainer.size,))
    state = {n: distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None) for n, t in state_of(1, "untied").items()}
    told = told_by(lambda: engine.update_weights_from_tensor(list(state.items())))
    engine._sender.close()
    return told


@shows(ITEMS)
def test_a_head_that_is_not_the_embedding_is_refused_by_an_engine_that_ties_them():
    told, found = run_world(2, 2, train_untied_for_a_tied_engine, serve, "tied")
    assert told[0] == told[1]
    assert f"{HEAD} differs from {EMBEDDING}, but the engine ties the two" in told[0]
    assert "ignore=" not in told[0]
    assert found == [[{0}]] * 2


def train_in_buckets(trainer, _):
    """One call for each bucket, as verl's sharding manager made, then what these calls become."""
    engine = engine_over(trainer.group, trainer.send)
    named = list(state_of(1, "untied").items())
    calls = {
        "one name": lambda: engine.update_weights_from_tensor(named[:1], flush_cache=False),
        "nothing": lambda: engine.update_weights_from_tensor([], flush_cache=True),
        "frozen": lambda: engine.update_weights_from_tensor(named[4:], frozen=["embed", "qkv"]),
        "only": lambda: engine.update_weights_from_tensor(dict(named[:1]), only=["embed"]),
        "all": lambda: engine.update_weights_from_tensor(named, flush_cache=True),
    }
    told = {name: told_by(call) for name, call in calls.items()}
    with pytest.raises(Unsupported, match="load_format='direct'"):
        engine.update_weights_from_tensor(named, load_format="direct")
    engine._sender.close()
    return told


@shows(SUBSET, BUCKETS, NOTHING, LOAD_FORMAT)
def test_subsets_and_buckets_and_an_empty_list():
    told, found = run_world(2, 2, train_in_buckets, serve, "untied")
    assert told[0] == told[1]
    assert "is not written by the loader at all" in told[0]["one name"]
    assert "frozen=" in told[0]["one name"]
    assert told[0]["nothing"] == "Mismatch: trainer rank 0: no tensors were passed"
    assert all(word in told[0]["nothing"] for word in words(NOTHING)[:2])
    assert [told[0][name] for name in ("frozen", "only", "all")] == [True] * 3
    assert found == [[{0}, {0, 1}, {0, 1}, {1}]] * 2


def train_data_parallel(trainer, _, kind):
    """Two engines, each for two of four trainer ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    if kind == "fsdp":
        placements, on = [Shard(0), Shard(0)], mesh
    else:
        placements, on = [Shard(0)], mesh["tp"]
    rows = {n: distribute_tensor(t, on, placements, src_data_rank=None) for n, t in state_of(1, "tied").items()}
    mine = mesh.get_local_rank("dp")
    engine = engine_over(mesh["tp"].get_group(), trainer.send if trainer.rank == 0 else refuse(trainer, mine))
    told = told_by(lambda: engine.update_weights_from_tensor(rows.items()))
    engine._sender.close()
    return told


def refuse(trainer, mine):
    """Trainer rank 2 is the first of the other engine's, which is not there."""

    def send(_):
        raise ReshardError("no engine")

    return send if mine == 1 and trainer.rank == 2 else None


@shows(OVER_ALL, OVER_TP)
@pytest.mark.parametrize("kind", ["fsdp", "tp"])
def test_data_parallel_trainers_with_an_engine_each(kind):
    told, found = run_world(4, 1, train_data_parallel, serve, "tied", kind)
    if kind == "tp":
        assert told[:2] == [True, True]
        assert found == [[{1}]]
    else:
        assert all("trainer ranks of this update hold only" in message for message in told[:2]), told
        assert all("Create the sender on all ranks that hold shards of it" in message for message in told[:2])
        assert found == [[]]


def test_every_row_is_shown_by_a_test():
    assert SHOWN.keys() == ROWS.keys()
    for test in SHOWN.values():
        path, name = test.split("::")
        assert f"def {name}" in (ROOT / path).read_text(), test


def test_arguments_and_methods_of_the_table_exist():
    """Options of `update` and of the constructor, methods, and classes."""
    known = {*inspect.signature(VerlEngine).parameters, *dir(VerlEngine)}
    known |= {field.name for options in (SenderOptions, UpdateOptions) for field in dataclasses.fields(options)}
    known |= {*dir(errors), "UpdateReport", "MultiEngineSender"}
    written = {word.removesuffix("()") for row in ROWS for word in words(row)} - {
        "no tensors were passed",
        'mesh["tp"]',
    }
    assert written <= known
