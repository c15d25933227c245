"""docs/reference/api.md: the public names, as directives for mkdocstrings, which shows their docstrings."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import NamedTuple

import sglang_reshard
from tools.website import fields, markdown


class Group(NamedTuple):
    """Names under one heading, all imported from `module`."""

    heading: str
    module: str
    names: tuple[str, ...]


_TOP = "sglang_reshard"
GROUPS = (
    Group("Senders to an SGLang engine", _TOP, ("WeightSender", "MultiEngineSender", "VerlEngine")),
    Group("Options and reports", _TOP, ("SenderOptions", "UpdateOptions", "UpdateReport")),
    Group("A server", _TOP, ("RemoteEngine", "WeightsInfo")),
    Group("Torch modules", _TOP, ("ModuleSender", "ModuleReceiver", "reshard", "ReshardPlan")),
    Group("vLLM engines", "sglang_reshard.extras.vllm.engine", ("send_to",)),
    Group("Diffusion transformers", "sglang_reshard.extras.diffusion.receiver", ("TransformerReceiver",)),
    Group("Snapshots", _TOP, ("Snapshots", "SnapshotFollower")),
    Group("Probes and checks", _TOP, ("Probe", "ProbeReport", "first_not_finite")),
    Group("Broadcast parameters", _TOP, ("ParameterStream",)),
    Group("Requests", _TOP, ("DistributedUpdateWeightsReq", "DistributedUpdateWeightsOutput")),
    Group(
        "Sources of trainer weights",
        "sglang_reshard.sources",
        (
            "ExplicitSharding",
            "ShardMap",
            "FusedTensor",
            "FusedSlice",
            "FlatBuffer",
            "FlatMember",
            "adapter_config",
            "adapter_tensors",
            "megatron_adapter_config",
            "megatron_adapter_tensors",
        ),
    ),
    Group("Boxes", "sglang_reshard.layout.regions", ("Box",)),
    Group("Sessions", "sglang_reshard.protocol.session", ("Session",)),
    Group("Updates in the background", "sglang_reshard.extras.asynchronous.background", ("UpdateHandle",)),
)

_INTRODUCTION = """\
These names are public; all others may change in any version. The site (`make docs`) shows their signatures and
docstrings here. See also the [exceptions](errors.md), the [options](settings.md) and the
[commands](../usage/command-line.md)."""


def page() -> str:
    blocks = [_INTRODUCTION]
    for group in GROUPS:
        rows = [[f"`{name}`", markdown.cell(_summary(group, name))] for name in group.names]
        blocks += [f"## {group.heading}", f"From `{group.module}`:", markdown.table(["name", ""], rows)]
        blocks += [f"::: {defined_in(group, name)}.{name}" for name in group.names]
    return markdown.page("Python API", *blocks)


def listed() -> set[tuple[str, str]]:
    """Returns (module, name) of every name on the page."""
    return {(group.module, name) for group in GROUPS for name in group.names}


def defined_in(group: Group, name: str) -> str:
    """Returns the module that defines the name; the package itself imports its names on first use only."""
    return str(_object(group, name).__module__)


def _object(group: Group, name: str) -> object:
    return getattr(import_module(group.module), name)


def _summary(group: Group, name: str) -> str:
    """Returns the first sentence of the docstring."""
    docstring = inspect.getdoc(_object(group, name)) or ""
    return fields.opening(docstring).split("\n\n")[0]


PRIVATE = {"__version__"}  # of `sglang_reshard.__all__`: not shown


def public() -> set[str]:
    return set(sglang_reshard.__all__) - PRIVATE
