"""Options of senders and updates: by name or whole they are the same, and a mistake in one is an error at once."""

import dataclasses
import inspect

import pytest

from sglang_reshard import (
    ModuleSender,
    MultiEngineSender,
    ParameterStream,
    RemoteEngine,
    SenderOptions,
    Snapshots,
    UpdateOptions,
    VerlEngine,
    WeightSender,
)
from sglang_reshard.control import Address
from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.layout.names import Renaming

ADDRESS = Address("s", "127.0.0.1", 1, "00")


def test_what_is_given_by_name_counts_more_than_what_is_given_whole():
    whole = SenderOptions(transport="p2p", timeout_s=5.0)
    assert SenderOptions.of(whole, {}) == whole
    assert SenderOptions.of(whole, {"timeout_s": 7.0}) == SenderOptions(transport="p2p", timeout_s=7.0)
    assert SenderOptions.of(None, {}) == SenderOptions()
    assert UpdateOptions.of(UpdateOptions("1", staged=True), {"weight_version": "2"}) == UpdateOptions("2", staged=True)
    with pytest.raises(TypeError, match="stagd"):
        UpdateOptions.of(None, {"stagd": True})


def test_patterns_and_renamings_are_read_once():
    options = UpdateOptions(ignore="model.mtp.*", frozen=["visual.*"], only=None, rename={"policy.": ""})
    assert (options.ignore, options.frozen, options.only) == (("model.mtp.*",), ("visual.*",), ())
    assert options.renaming == Renaming.of({"policy.": ""}, ("model.mtp.*",))
    assert UpdateOptions(rename={"policy.": ""}).renaming == Renaming.of({"policy.": ""})
    assert UpdateOptions.of(options, {"staged": True}).renaming == options.renaming
    assert UpdateOptions(rename={}).renaming is None
    with pytest.raises(Mismatch, match="rename is a int"):
        UpdateOptions(rename=3)
    with pytest.raises(Unsupported, match="verify='all' is not supported; use 'off' or 'sample' or 'full'"):
        UpdateOptions(verify="all")


def test_an_embedded_engine_gets_what_is_no_option_of_a_sender():
    of_sender, of_engine = SenderOptions.split(
        {"transport": "p2p", "delta": "auto", "model_path": "m", "dtype": "auto"}
    )
    assert of_sender == {"transport": "p2p", "delta": "auto"}
    assert of_engine == {"model_path": "m", "dtype": "auto"}


@pytest.mark.parametrize("kind", [ModuleSender, MultiEngineSender, VerlEngine, WeightSender])
def test_options_of_a_sender_are_declared_nowhere_else(kind):
    declared = set(inspect.signature(kind.__init__).parameters)
    assert {"options", "given"} <= declared
    assert not declared & {field.name for field in dataclasses.fields(SenderOptions)}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"transport": "p2q"}, "Did you mean 'p2p'"),
        ({"transport": "boardcast"}, "auto, ipc, p2p, broadcast, nixl. Did you mean 'broadcast'"),
        ({"delta": "of"}, "delta='of' is not supported; use 'off' or 'auto'. Did you mean 'off'"),
        ({"delta": "auto", "transport": "broadcast"}, "has no effect with transport='broadcast'"),
        ({"bucket_bytes": 0}, "bucket_bytes=0 must be positive"),
        ({"timeout_s": float("nan")}, "timeout_s=nan must be positive"),
        ({"transprot": "p2p"}, "they are transport, bucket_bytes, .*Did you mean 'transport'"),
        ({"strategy": "p2p"}, "'strategy' is no option of a sender; they are transport"),
        ({"verify": "full"}, r"'verify' is no option of a sender, but of its updates: pass it to update\(\)"),
    ],
)
def test_a_misspelt_option_is_named_at_construction(given, words):
    """Without a process group and a server: nothing is looked at before."""
    constructors = [
        lambda: SenderOptions.of(None, given),
        lambda: WeightSender("http://127.0.0.1:1", **given),
        lambda: WeightSender.over(None, None, **given),
        lambda: WeightSender.within(None, trainer_rank=0, global_ranks=(0,), send=None, **given),
        lambda: ModuleSender(**given),
        lambda: MultiEngineSender(ADDRESS, trainer_rank=0, global_ranks=(0,), **given),
        lambda: ParameterStream(None, **given),
    ]
    if "strategy" not in given:  # an argument of the embedded engine, as far as can be told here
        constructors += [
            lambda: VerlEngine(None, **given),
            lambda: VerlEngine(None, backend="server", url="http://127.0.0.1:1", **given),
        ]
    for construct in constructors:
        with pytest.raises((Mismatch, Unsupported, TypeError), match=words):
            construct()


def test_misspelt_values_of_updates_name_the_nearest():
    with pytest.raises(Unsupported, match="Did you mean 'sample'"):
        UpdateOptions(verify="sampel")
    with pytest.raises(TypeError, match=r"they are weight_version, .*Did you mean 'staged'"):
        UpdateOptions.of(None, {"stagd": True})
    with pytest.raises(TypeError, match=r"'transport' is no option of an update, .* pass it to WeightSender\(\.\.\.\)"):
        UpdateOptions.of(None, {"transport": "p2p"})
    with pytest.raises(Unsupported, match="Did you mean 'server'"):
        VerlEngine(None, backend="servr")
    sender = MultiEngineSender(ADDRESS, trainer_rank=0, global_ranks=(0,))
    with pytest.raises(Unsupported, match=r"on_failure='exlude' .*Did you mean 'exclude'"):
        sender.update([], on_failure="exlude")
    with pytest.raises(Unsupported, match=r"dtype='bfloat61' .*Did you mean 'bfloat16'"):
        Snapshots(sender, "folder", dtype="bfloat61")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda engine: engine.pull_weights("http://b:1", transport="p2q"), "Did you mean 'p2p'"),
        (lambda engine: engine.pull_weights("http://b:1", verify="ful"), "Did you mean 'full'"),
        (lambda engine: engine.pull_weights("http://b:1", verfy="full"), "verfy"),
        (lambda engine: engine.pause_generation("abrt"), "Did you mean 'abort'"),
    ],
)
def test_a_client_checks_before_it_connects(call, words):
    """Nothing listens at the URL: a request would raise EngineUnreachable."""
    with pytest.raises((Mismatch, Unsupported, TypeError), match=words):
        call(RemoteEngine("http://127.0.0.1:1"))
