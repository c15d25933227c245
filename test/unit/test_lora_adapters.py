"""The adapters of one update arrive together, on all engine ranks or on none, each under its own name."""

import asyncio
import json
from types import SimpleNamespace

import msgspec
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from sglang_reshard import Adapter
from sglang_reshard.control import Address
from sglang_reshard.errors import EngineRefused, Mismatch, Unsupported
from sglang_reshard.extras import lora_adapters as sent
from sglang_reshard.patches import lora_adapters, lora_names, lora_trial, weights_info
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq, LoraAdapter
from sglang_reshard.sources import FlatBuffer, FlatMember, FusedSlice, FusedTensor
from support.world import run_world

CPU = torch.device("cpu")


def config(rank, alpha=8):
    return json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": ["up"]})


def values(name, version, rank=4):
    """An adapter's tensors, whole: no two names and versions have the same ones."""
    first = 1000 * version + 100 * ord(name[0])
    a, b = (torch.arange(n * rank, dtype=torch.float32) + first for n in (6, 10))
    return {"base_model.model.up.lora_A.weight": a.view(rank, 6), "base_model.model.up.lora_B.weight": b.view(10, rank)}


def adapter(trainer, name, version, rank=4, **more):
    mesh = init_device_mesh("cpu", (trainer.size,))
    tensors = {n: distribute_tensor(t, mesh, [Shard(0)]) for n, t in values(name, version, rank).items()}
    return Adapter(config(rank), tensors, **more)


def train(trainer):
    """Several sets of adapters, then one alone; "e" is refused by one engine rank, once it is sent."""
    sender = trainer.sender()
    adapters = sender.lora_adapters()
    reports = [adapters.update({"b": adapter(trainer, "b", 1), "a": adapter(trainer, "a", 1)})]
    reports.append(adapters.update({"b": adapter(trainer, "b", 2), "c": adapter(trainer, "c", 2, rank=2)}))
    some = {name: adapter(trainer, name, 3, rank) for name, rank in (("a", 4), ("e", 8), ("d", 4))}
    with pytest.raises(EngineRefused) as refused:
        adapters.update(some)
    del some["e"]
    reports += [adapters.update(some), adapters.update(some)]
    alone = sender.lora_adapter("d", config(4))
    reports.append(alone.update(adapter(trainer, "d", 4).tensors))
    reports.append(adapters.update({"d": adapter(trainer, "d", 5)}))
    return str(refused.value), [sum(r.least_bytes for r in report.engine_ranks) for report in reports]


def serve(rank, size, requests):
    """What is served after each request, as SGLang would be given it; and how often SGLang has tried an adapter."""
    manager, served, tried, seen = SimpleNamespace(device=CPU, loras={}), {}, [], []
    runner = SimpleNamespace(lora_manager=manager)

    def refusal(_, adapter, specs):
        tried.append(adapter.name)
        return f"the LoRA adapter {adapter.name}: no such module" if adapter.name == "e" and rank == 1 else ""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lora_trial, "refusal", refusal)
        patch.setattr(lora_adapters, "_install", lambda _, adapter, tensors: served.update({adapter.name: tensors}))
        patch.setattr(lora_adapters, "_load_slots", lambda _, ids: manager.loras.update(dict.fromkeys(ids)))
        for request in requests:
            lora = tuple(msgspec.structs.replace(adapter, lora_id=f"of {adapter.name}") for adapter in request.lora)
            request = msgspec.structs.replace(request, lora=lora)
            assert request.staged
            receiver = lora_adapters.receiver(runner, request, rank, size)
            requests.answer(receiver.update(request))
            seen.append({name: {n: t.tolist() for n, t in tensors.items()} for name, tensors in served.items()})
    return seen, tried


def test_all_adapters_of_an_update_arrive_or_none():
    told, engines = run_world(2, 2, train, serve)
    for refused, received in told:
        assert "the LoRA adapter e: no such module" in refused
        # Every engine rank has whole adapters: 64 elements of four bytes, or 32.
        assert received == [2 * 4 * n for n in (64 + 64, 64 + 32, 64 + 64, 64 + 64, 64, 64)]
    expected = [{"a": 1, "b": 1}, {"a": 1, "b": 2, "c": 2}, {"a": 1, "b": 2, "c": 2}]
    expected += [{"a": 3, "b": 2, "c": 2, "d": 3}] * 2
    expected += [{"a": 3, "b": 2, "c": 2, "d": 4}, {"a": 3, "b": 2, "c": 2, "d": 5}]
    for seen, _ in engines:
        assert len(seen) == len(expected), "one request for each update"
        for served, versions in zip(seen, expected, strict=True):
            assert served.keys() == versions.keys()
            for name, version in versions.items():
                whole = values(name, version, 2 if name == "c" else 4)
                assert served[name] == {tensor: value.tolist() for tensor, value in whole.items()}
    # One of those that are alike is tried, and no layout twice.
    assert all("".join(tried).startswith("abcae") and tried[-3:] == ["a", "d", "d"] for _, tried in engines)


def test_names_in_shardings_are_those_of_the_update_and_the_same_object_again():
    box = FusedSlice((0, 0), (2, 4), (0, 1))
    fused = FusedTensor((("up.lora_A", box), ("down.lora_A", box)))
    member = FlatMember("up.lora_B", (2, 4), 0, (("0.up.lora_B", box),))
    flat, other = FlatBuffer((member,), ((0, 0, 8),)), object()
    rows = [("f", CPU, fused), ("g", CPU, flat), ("h", CPU, other), ("i", CPU)]
    listed = list(sent._rows({"b": Adapter("{}", rows), "a": Adapter("{}", [("i", CPU)])}, 0))
    assert [row[0] for row in listed] == ["a/i", "b/f", "b/g", "b/h", "b/i"]
    assert [name for name, _ in listed[1][2].slices] == ["b/up.lora_A", "b/down.lora_A"]
    (found,) = listed[2][2].members
    assert (found.name, found.slices[0][0], listed[2][2].ranges) == ("b/up.lora_B", "b/0.up.lora_B", flat.ranges)
    assert listed[3][2] is other
    again = list(sent._rows({"b": Adapter("{}", rows)}, 0))
    assert again[0][2].slices is listed[1][2].slices
    assert again[1][2].members is listed[2][2].members


A, B = LoraAdapter("a", config(4), lora_id="1"), LoraAdapter("x/b", config(2), lora_id="2")


def test_each_adapter_has_its_own_tensors():
    assert lora_adapters.of_each([A], ["t", "u"]) == [(A, {"t": "t", "u": "u"})]
    assert lora_adapters.of_each([A], ["a/t"]) == [(A, {"t": "a/t"})]
    assert lora_adapters.of_each([B, A], ["a/t", "x/b/t"]) == [(B, {"t": "x/b/t"}), (A, {"t": "a/t"})]
    for adapters, names in (([A, B], ["a/t", "x/b/t", "t"]), ([A], ["b/t"]), ([A, B], ["a/t", "b/t"])):
        with pytest.raises(Mismatch, match="is a tensor of none of the adapters a"):
            lora_adapters.of_each(adapters, names)
    with pytest.raises(Mismatch, match="the LoRA adapter x/b has no tensors"):
        lora_adapters.of_each([A, B], ["a/t"])


def request(session, *adapters, **more):
    address = Address(session, "127.0.0.1", 1, "5ec2e7")
    return DistributedUpdateWeightsReq(
        address=address, update=1, layout="", handles=(), trainer_hosts=(), lora=adapters, **more
    )


def test_a_session_keeps_its_memory_until_its_adapters_are_gone_or_come_from_another():
    runner = SimpleNamespace(lora_manager=SimpleNamespace(device=CPU, loras={"1": 0, "2": 0, "3": 0}))

    def receiver(*given):
        return lora_adapters.receiver(runner, request(*given), 0, 1)

    c = LoraAdapter("c", config(4), lora_id="3")
    both = receiver("s/lora/", A, B)
    alone = receiver("s/lora/c", c)
    assert receiver("s/lora/", A) is both
    assert receiver("s/lora/", B, A) is both
    assert receiver("s/lora/c", c) is alone
    assert receiver("t/lora/c", c) is not alone  # another trainer's
    assert receiver("s/lora/", A, B) is both
    runner.lora_manager.loras.pop("1")
    receiver("t/lora/c", c)
    assert receiver("s/lora/", A, B) is both, "one of its adapters is loaded"
    runner.lora_manager.loras.clear()
    receiver("t/lora/c", c)
    assert receiver("s/lora/", A, B) is not both


def test_another_configuration_is_checked_again():
    target = lora_adapters._Adapters(SimpleNamespace(device=CPU))
    signatures = set()
    for adapters in ((A,), (B,), (A, B), (msgspec.structs.replace(A, config=config(4, alpha=1)),)):
        target.adapters = adapters
        signatures.add(target.signature())
    assert len(signatures) == 4
    target.adapters = (msgspec.structs.replace(A, lora_id="9", version="7"),)
    assert target.signature() in signatures


class Registry:
    def __init__(self):
        self._registry = {}

    def get_all_adapters(self):
        return dict(self._registry)

    async def register(self, reference):
        self._registry[reference.lora_name] = reference


@pytest.fixture
def manager(monkeypatch):
    def reference(adapter):
        return SimpleNamespace(lora_name=adapter.name, lora_id=adapter.lora_id)

    monkeypatch.setattr(lora_names, "reference", reference)
    arguments = SimpleNamespace(weight_version="3", dp_size=1, enable_lora=True, max_loaded_loras=3)
    registry = Registry()
    registry._registry["stock"] = SimpleNamespace(lora_name="stock", lora_id="0")
    return SimpleNamespace(server_args=arguments, is_pause=False, lora_registry=registry, lora_ref_cache={"a": 1})


def versions_after(manager, *adapters, **more):
    asyncio.run(lora_names.updated(manager, lora_names.with_lora_ids(manager, request("s", *adapters, **more))))
    return weights_info.current(manager).adapters


def test_the_server_tells_the_version_of_each_adapter(manager):
    a, b = (LoraAdapter(name, "{}") for name in "ab")
    assert weights_info.current(manager).adapters == {"stock": ""}
    assert versions_after(manager, a, b, weight_version="1") == {"stock": "", "a": "1", "b": "1"}
    assert "a" not in manager.lora_ref_cache
    own = msgspec.structs.replace(b, version="b-7")
    assert versions_after(manager, own, weight_version="2") == {"stock": "", "a": "1", "b": "b-7"}
    assert versions_after(manager, a) == {"stock": "", "a": "", "b": "b-7"}
    manager.lora_registry._registry.pop("b")  # SGLang unloads it
    assert weights_info.current(manager).adapters == {"stock": "", "a": ""}
    assert versions_after(manager, b, weight_version="3") == {"stock": "", "a": "", "b": "3"}
    assert len(weights_info.of(manager).adapters) == 3, "of those that are loaded"
    lora_names.unload(manager, [a, b], "torn")
    assert weights_info.current(manager).adapters == {"stock": ""}


def test_adapters_that_do_not_fit_together_are_refused_by_name(manager):
    a, b, c = (LoraAdapter(name, "{}") for name in "abc")
    assert lora_names.refusal(manager, [a, b]) == ""
    assert "the LoRA adapter a is sent twice" in lora_names.refusal(manager, [a, b, a])
    said = lora_names.refusal(manager, [a, LoraAdapter("stock", "{}"), b, c])
    assert "has 1 LoRA adapters, and with a, b, c it would have more than max_loaded_loras=3" in said
    manager.server_args.max_loaded_loras = 1
    assert lora_names.refusal(manager, [LoraAdapter("stock", "{}")]) == "", "it is loaded already"
    manager.server_args.max_loaded_loras = None
    assert lora_names.refusal(manager, [a, b, c]) == ""
    manager.server_args.enable_lora = None
    assert "was started without LoRA" in lora_names.refusal(manager, [a])


def adapters_of_one(trainer):
    sender = trainer.sender()
    adapters = sender.lora_adapters()
    with pytest.raises(Mismatch, match="lora_adapters was already called"):
        sender.lora_adapters()
    with pytest.raises(Mismatch, match="no tensors were passed"):
        adapters.update({})
    changed = json.dumps({"changed_base": "init_lora_weights='pissa'"})
    with pytest.raises(Unsupported, match="pissa"):
        adapters.update({"a": Adapter(changed, values("a", 1))})
    sender.close()
    assert adapters._closed
    return True


def test_what_is_no_set_of_adapters_is_refused_by_the_trainer():
    assert run_world(1, 0, adapters_of_one, serve)[0] == [True]
