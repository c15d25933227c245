"""A function that has a name among its uses is found by that name."""

import argparse
import dataclasses
import inspect
import logging
import types

import pytest
import torch

from sglang_reshard.trace import code_uses
from sglang_reshard.trace.code_uses import CELL, GLOBAL, functions_of, methods_of


@pytest.mark.parametrize(
    "python_module", [argparse, dataclasses, inspect, logging, torch.nn.functional, torch.serialization]
)
def test_functions_are_found_by_each_name_that_they_use(python_module: types.ModuleType) -> None:
    functions = code_uses._functions_of(python_module)
    assert len(functions) > 5
    for code, _ in functions:
        uses = code_uses.uses_of(code)
        stores = {name.removeprefix(GLOBAL).removeprefix(CELL) for name in uses.stores}
        for name in uses.loads | uses.fills | uses.arguments | stores:
            assert uses in list(functions_of(python_module, name)), (code, name)


class Keeper:
    def keep(self, value):
        setattr(self, "kept", torch.add(value, 1, out=self.buffer))  # noqa: B010

    def other(self):
        return "kept"


@pytest.mark.parametrize(
    ("name", "methods"), [("kept", ["keep"]), ("out", ["keep"]), ("value", ["keep"]), ("none", [])]
)
def test_methods_are_found_by_strings_that_name_attributes_and_by_keywords(name: str, methods: list[str]) -> None:
    assert list(methods_of(Keeper, name)) == methods
