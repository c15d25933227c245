"""What torch keeps private is found by name, or its lack is an error that names it and torch's version."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sglang_reshard import torch_private

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "sglang_reshard"
# What is read where it is used, as updates go on without it, or refuse with a message of their own.
READ_WHERE_USED = {
    "sources/memory_identity.py": {
        "torch._C",
        "torch._C.DisableTorchFunctionSubclass",
        "torch._C._dynamo.guards.TensorGuards",
    },
    "sources/fsdp.py": {
        "torch.distributed._composable_state._module_state_mapping",
        "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState",
    },
    "sources/fsdp1.py": {"torch.distributed.fsdp._common_utils.clean_tensor_name"},
    "gpu/runtime.py": {"torch._C", *torch_private.NEEDED_ON_GPUS},
}


@pytest.mark.parametrize("name", torch_private.NEEDED_ON_GPUS)
@pytest.mark.skipif(not torch.version.cuda, reason="this torch is not built for CUDA")
def test_this_torch_has_for_gpus(name: str) -> None:
    assert torch_private.missing([name]) == []


@pytest.mark.parametrize(
    ("taken", "name"),
    [
        (
            "from torch.distributed.device_mesh import DeviceMesh\ndel DeviceMesh._get_root_mesh",
            "torch.distributed.device_mesh.DeviceMesh._get_root_mesh",
        ),
        (
            "from torch.distributed.tensor import placement_types\ndel placement_types._StridedShard",
            "torch.distributed.tensor.placement_types._StridedShard",
        ),
    ],
)
def test_a_torch_that_has_renamed_it_is_refused_by_name(taken: str, name: str) -> None:
    code = f"{taken}\nfrom sglang_reshard import WeightSender"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: torch {torch.__version__} is not supported: it has no {name}. "), last
    assert "needs torch 2.10 or newer" in last


def test_its_lower_bound_is_the_package_s() -> None:
    oldest = torch_private.TESTED.split(" ")[0]
    assert f'"torch>={oldest}"' in (ROOT / "pyproject.toml").read_text()


_PRIVATE = re.compile(r"torch(\.\w+)*\._\w+(\.\w+)*")


def private_names(tree: ast.AST) -> Iterator[str]:
    """Full names of what a module takes from private parts of torch."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        else:
            continue
        yield from (name for name in names if _PRIVATE.fullmatch(name))


def test_nothing_else_of_torch_s_private_parts_is_used() -> None:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        where = path.relative_to(PACKAGE).as_posix()
        if where.startswith(("testing/", "cli/plan/")) or where == "torch_private.py":
            continue  # no update imports these
        known = {
            "torch._C",
            "torch.__file__",
            "torch.__version__",
            *torch_private.NEEDED,
            *READ_WHERE_USED.get(where, ()),
        }
        used = set(private_names(ast.parse(path.read_text())))
        if others := {name for name in used if not any(k == name or k.startswith(f"{name}.") for k in known)}:
            found[where] = others
    assert found == {}
