"""What imports what: packages depend downwards only, and a light client imports only what it uses."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Where each package's sources are; most are under python/.
SOURCES = {
    ROOT / "python" / "sglang_reshard": "sglang_reshard",
    ROOT / "patches": "sglang_reshard.patches",
    ROOT / "verl_integration": "sglang_reshard.verl",
}
# From the top down. A package may import from those in lower rows, and from those in its own row if there is no circle.
LAYERS = (
    ("__main__",),
    ("verl", "cli", "selftest"),
    ("extras", "extras.diffusion"),
    ("extras.modules", "extras.parameter_stream", "extras.snapshots", "extras.verl_engine"),
    ("api", "patches"),
    ("extras.lora_adapters",),
    ("extras.asynchronous", "extras.finite", "extras.probe", "extras.realloc", "extras.replicas", "extras.vllm"),
    ("trainer", "engine", "extras.request_mail"),
    ("routes",),
    ("landings",),
    ("protocol",),
    ("memory", "copying"),
    ("plan", "derived"),
    ("sources", "trace"),
    ("layout",),
    ("control", "observability", "testing"),
    ("tasks",),
    ("gpu",),
    ("version", "garbage", "route_table", "torch_private", "nearest", "regular_files", "shown_names"),
    ("errors",),
)
# Packages that know less than their row allows.
ONLY = {
    "control": {"errors"},
    "observability": {"version", "gpu"},
    "memory": {"layout", "gpu", "errors", "observability"},
    "copying": {"layout", "gpu", "errors", "observability"},
}


def modules() -> dict[str, Path]:
    found = {}
    for folder, package in SOURCES.items():
        for path in folder.rglob("*.py"):
            parts = (package, *path.relative_to(folder).with_suffix("").parts)
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imported_at_top_level(tree: ast.AST) -> Iterator[ast.ImportFrom]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.ImportFrom):
            yield node
        yield from imported_at_top_level(node)


def package_of(module: str) -> str:
    """The first name below sglang_reshard, with the next one for an extra; empty for the package itself."""
    names = module.split(".")[1:]
    return ".".join(names[: 2 if names[:1] == ["extras"] else 1])


def arrows() -> dict[tuple[str, str], list[str]]:
    """(package, package that it imports) -> the imports, in words."""
    known = modules()
    found: dict[tuple[str, str], list[str]] = {}
    for module, path in known.items():
        for node in imported_at_top_level(ast.parse(path.read_text())):
            if node.module is None or not node.module.startswith("sglang_reshard"):
                continue
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                target = full if full in known else node.module
                if package_of(module) != package_of(target):
                    key = package_of(module), package_of(target)
                    found.setdefault(key, []).append(f"{module} imports {target}")
    return found


def test_packages_import_downwards_only():
    row = {package: i for i, packages in enumerate(LAYERS) for package in packages}
    upwards = []
    for (package, target), imports in arrows().items():
        if package == "":  # the package itself imports public names on first use
            assert target == "version", imports
        elif row[package] > row[target] or target not in ONLY.get(package, {target}):
            upwards += imports
    assert upwards == []


def test_no_packages_import_each_other():
    below: dict[str, set[str]] = {}
    for package, target in arrows():
        below.setdefault(package, set()).add(target)
    TopologicalSorter(below).prepare()  # raises CycleError


def test_no_files_import_each_other_not_even_for_types():
    known = modules()
    below: dict[str, set[str]] = {}
    for module, path in known.items():
        tree = ast.parse(path.read_text())
        inner = {id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and id(node) not in inner:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                below.setdefault(module, set()).update(n if n in known else node.module or "" for n in names)
    TopologicalSorter({module: targets - {module} for module, targets in below.items()}).prepare()


@pytest.mark.parametrize(
    ("name", "imported", "others"),
    [
        ("WeightSender", "trainer.worker", "sglang verl ray .trace .engine .patches .cli .testing"),
        (
            "RemoteEngine",
            "api.remote_engine",
            "sglang verl ray torch.distributed .trainer .routes .trace .engine .plan .sources",
        ),
        ("DistributedUpdateWeightsReq", "protocol.messages", "torch"),
        ("UpdateReport", "observability.report", "torch"),
        ("WeightsInfo", "protocol.weights_info", "torch"),
    ],
)
def test_a_name_imports_only_what_it_needs(name: str, imported: str, others: str) -> None:
    code = f"import sys\nfrom sglang_reshard import {name}\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.split()
    assert f"sglang_reshard.{imported}" in loaded
    packages = [f"sglang_reshard{other}" if other.startswith(".") else other for other in others.split()]
    assert [m for m in loaded if any(m == p or m.startswith(f"{p}.") for p in packages)] == []


def test_no_two_test_modules_have_one_name():
    """pytest imports test modules by their base names; two of one name end the collection of a whole run."""
    names = [path.stem for path in (ROOT / "test").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
