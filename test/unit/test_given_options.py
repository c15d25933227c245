"""The options that are given by name are, for type checkers too, those of the classes that declare them."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
import typing

import pytest

from sglang_reshard import MultiEngineSender, SenderOptions, UpdateOptions, WeightSender
from sglang_reshard.api import given
from sglang_reshard.extras.snapshots.of_sender import SnapshotGiven, SnapshotOptions
from sglang_reshard.protocol.messages import (
    DistributedUpdateWeightsReq,
    LoadGiven,
    LoadSnapshotReq,
    PullGiven,
    PullWeightsReq,
)


def declared(kind: type, *without: str) -> dict[str, object]:
    return {name: hint for name, hint in typing.get_type_hints(kind).items() if name not in without}


@pytest.mark.parametrize(
    ("by_name", "options", "without"),
    [
        (given.SenderGiven, SenderOptions, ()),
        (given.UpdateGiven, UpdateOptions, ()),
        (given.UnversionedGiven, UpdateOptions, ("weight_version",)),
    ],
)
def test_options_by_name_are_the_fields_and_their_types(by_name: type, options: type, without: tuple[str, ...]) -> None:
    assert declared(by_name) == declared(options, *without)


def test_options_of_snapshots_by_name_are_the_fields() -> None:
    """A path may be a string there, and a renaming what it is made of."""
    names = {field.name for field in dataclasses.fields(SnapshotOptions)} - {"name"}
    assert set(typing.get_type_hints(SnapshotGiven)) == names
    same = names - {"copy_from", "rename"}
    given_types, types = typing.get_type_hints(SnapshotGiven), typing.get_type_hints(SnapshotOptions)
    assert {name: given_types[name] for name in same} == {name: types[name] for name in same}


@pytest.mark.parametrize(
    ("function", "by_name"),
    [
        (MultiEngineSender.update, given.EnginesGiven),
        (MultiEngineSender.update_async, given.EnginesAsyncGiven),
        (WeightSender.update, given.UnversionedUpdateGiven),
    ],
)
def test_what_is_handed_on_by_name_is_what_the_function_takes(function: object, by_name: type) -> None:
    own = {
        name for name, p in inspect.signature(function).parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY
    }
    fields = {field.name for field in dataclasses.fields(UpdateOptions)}
    without = {"weight_version"} if by_name is given.UnversionedUpdateGiven else set()
    assert set(by_name.__annotations__) == (own | fields) - without


def test_a_pull_takes_the_fields_of_its_request() -> None:
    own = {"url", "api_key", "admin_api_key"}
    assert set(PullGiven.__annotations__) == set(PullWeightsReq.__struct_fields__) - own


def test_a_load_takes_the_fields_of_its_request_and_those_are_of_an_update() -> None:
    own = {"path", "version", "publication", "allow_rollback"}
    assert set(LoadGiven.__annotations__) == set(LoadSnapshotReq.__struct_fields__) - own
    assert set(LoadGiven.__annotations__) <= set(DistributedUpdateWeightsReq.__struct_fields__)


def test_types_of_options_cost_nothing_at_run_time() -> None:
    code = "import sys, sglang_reshard as s; s.WeightSender, s.MultiEngineSender, s.ModuleSender, s.Snapshots\n"
    code += "assert 'sglang_reshard.api.given' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
