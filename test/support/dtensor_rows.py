"""Outcomes of `support.dtensors` as rows of JSON, with torch alone: `python -m support.dtensor_rows [MESH ...]`."""

from __future__ import annotations

import collections
import json
import sys
from collections.abc import Sequence
from typing import Any

import torch

from support.dtensors import MESHES, REFUSED, SAME, WRONG, outcomes

NAMED = {"x".join(map(str, shape)): shape for shape in MESHES} | {"parts": None}


def rows(meshes: Sequence[str]) -> list[dict[str, Any]]:
    """A row per family and mesh: how many cases there are, and what became of them. `meshes` are names of NAMED."""
    counts: dict[tuple[str, str], collections.Counter[str]] = {}
    for name in meshes or NAMED:
        for outcome in outcomes(NAMED[name]):
            shape = "x".join(map(str, outcome.case.mesh_shape))
            counted_ = counts.setdefault((outcome.case.family, shape), collections.Counter())
            counted_["cases"] += 1
            counted_[outcome.ours] += 1
            counted_["torch"] += outcome.torchs == SAME
            counted_["both"] += outcome.torchs == outcome.ours == SAME
    version = torch.__version__.partition("+")[0]
    names = ("cases", SAME, REFUSED, WRONG, "torch", "both")
    return [
        {
            "torch_version": version,
            "family": family,
            "mesh": mesh,
            **{name: found[name] for name in names},
        }
        for (family, mesh), found in counts.items()
    ]


if __name__ == "__main__":
    json.dump(rows(sys.argv[1:]), sys.stdout)
