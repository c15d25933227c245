"""Names of 0.1 import under their old names, with a DeprecationWarning that gives the new one."""

import importlib
import importlib.util
import re
import subprocess
import sys

import pytest

from sglang_reshard import _deprecated
from sglang_reshard.api.multi_engine import MultiEngineSender
from sglang_reshard.api.weight_sender import WeightSender
from sglang_reshard.control import Address
from sglang_reshard.errors import Mismatch

# What 0.1's documents told users to import.
OF_0_1 = [
    ("sglang_reshard", "Fleet"),
    ("sglang_reshard.channel", "Hub"),
    ("sglang_reshard.fleet", "Fleet"),
    ("sglang_reshard.launch", "without_torchrun_variables"),
    ("sglang_reshard.messages", "DistributedUpdateWeightsReq"),
    ("sglang_reshard.receiver", "WeightReceiver"),
    ("sglang_reshard.remote", "RemoteEngine"),
    ("sglang_reshard.sender", "WeightSender"),
    ("sglang_reshard.session", "Session"),
    ("sglang_reshard.sources", "Held"),
    ("sglang_reshard.sources", "Stack"),
    ("sglang_reshard.sources.holdings", "Holdings"),
    ("sglang_reshard.sources.placements", "Layout"),
    ("sglang_reshard.verl_engine", "VerlEngine"),
]


def test_names_of_0_1_import_with_a_warning():
    """In a process of its own, which has not imported them before."""
    code = f"""
import importlib, warnings
for module, name in {OF_0_1}:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        getattr(importlib.import_module(module), name)
    print(module, name, *(w.message for w in caught if w.category is DeprecationWarning), sep=" | ")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for (module, name), line in zip(OF_0_1, done.stdout.splitlines(), strict=True):
        assert re.search(rf"{name} \| .*sglang_reshard\.\w+", line), f"no warning for {module}.{name}: {line}"


def test_what_has_moved_or_changed_its_name_exists():
    for new in _deprecated.MODULES.values():
        assert importlib.util.find_spec(f"sglang_reshard.{new}") is not None, new
    for module, names in _deprecated.NAMES.items():
        for old, (target, new) in names.items():
            with pytest.warns(DeprecationWarning, match=new):
                found = _deprecated.attribute(f"sglang_reshard.{module}", old)
            assert found is getattr(importlib.import_module(f"sglang_reshard.{target}"), new)


def test_old_keywords_are_accepted():
    sender = MultiEngineSender(Address("s", "127.0.0.1", 1, "00"), trainer_rank=0, global_ranks=(0,))
    with pytest.warns(DeprecationWarning, match="unmap_after="), pytest.raises(Mismatch, match="set_engines"):
        sender.update([], let_go=True)
    with pytest.warns(DeprecationWarning, match="set_engines"):
        sender.attend({})
    sender = WeightSender.__new__(WeightSender)
    with pytest.warns(DeprecationWarning, match="unmap_after="), pytest.raises(AttributeError, match="_updating"):
        sender.update([], let_go=True)


def test_an_unknown_name_is_an_attribute_error():
    import sglang_reshard

    with pytest.raises(AttributeError, match="has no attribute 'Flock'"):
        _ = sglang_reshard.Flock
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("sglang_reshard.flock")
