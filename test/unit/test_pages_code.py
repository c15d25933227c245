"""Python in the pages that readers copy from: every name, method and argument of this package exists."""

import ast
import dataclasses
import inspect
import textwrap
from typing import Any

import pytest

from sglang_reshard import SenderOptions, UpdateOptions
from sglang_reshard.extras.snapshots.of_sender import SnapshotOptions, Snapshots
from support.documents import ROOT, blocks, text

PAGES = (
    "docs/which-api.md",
    "docs/faq.md",
    "docs/alternatives.md",
    "docs/usage/sizing.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs" / "recipes").glob("*.md")),
)
OF_SENDER = {field.name for field in dataclasses.fields(SenderOptions)}
OF_UPDATE = {field.name for field in dataclasses.fields(UpdateOptions)}


class Checker(ast.NodeVisitor):
    """Follows the objects of this package through one block. `problems` says what does not exist."""

    def __init__(self) -> None:
        self.known: dict[str, Any] = {}  # names that were imported
        self.kinds: dict[str, type] = {}  # variables that hold an object of a class of the package
        self.problems: list[str] = []
        self.calls = 0

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if (node.module or "").partition(".")[0] == "sglang_reshard":
            exec(compile(ast.Module([node], []), "page", "exec"), self.known)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        kind = self._made(node.value)
        for target in node.targets:
            if kind is not None:
                self.kinds[ast.unparse(target)] = kind

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        owner = self._owner(node.value)
        if owner is not None and not hasattr(owner, node.attr) and node.attr not in _fields(owner):
            self.problems.append(f"{ast.unparse(node)}: {owner.__name__} has no {node.attr}")

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        function = self._function(node.func)
        if function is None:
            return
        self.calls += 1
        allowed = arguments(function)
        given = [keyword.arg for keyword in node.keywords if keyword.arg]
        if allowed is not None:
            self.problems += [f"{ast.unparse(node.func)} takes no {name}" for name in given if name not in allowed]

    def _owner(self, node: ast.expr) -> type | None:
        name = ast.unparse(node)
        found = self.kinds.get(name, self.known.get(name))
        return found if isinstance(found, type) else None

    def _function(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Attribute):
            owner = self._owner(node.value)
            return getattr(owner, node.attr, None) if owner is not None else None
        return self.known.get(ast.unparse(node))

    def _made(self, node: ast.expr) -> type | None:
        """The class of what a call returns, where it is a constructor, or a class method that is one."""
        if not isinstance(node, ast.Call):
            return None
        if isinstance(node.func, ast.Attribute):
            owner = self._owner(node.func.value)
            return owner if owner is not None and ast.unparse(node.func.value) in self.known else None
        found = self.known.get(ast.unparse(node.func))
        return found if isinstance(found, type) else None


def arguments(function: Any) -> set[str] | None:
    """The arguments that a function takes by name. None if it passes any on to SGLang."""
    parameters = inspect.signature(function).parameters
    names = set(parameters)
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return names
    if function is Snapshots or function in (Snapshots.write, Snapshots.write_async):
        return names | {field.name for field in dataclasses.fields(SnapshotOptions)}
    if isinstance(function, type):
        of_engine = {"model_path"} if function.__name__ == "VerlEngine" else set()
        return names | OF_SENDER | of_engine
    return names | OF_UPDATE if "update" in function.__name__ else names | OF_SENDER if "given" in names else None


def _fields(owner: type) -> set[str]:
    """The attributes that its methods set, and those that it declares."""
    source = ast.walk(ast.parse(textwrap.dedent(inspect.getsource(owner))))
    stored = {n.attr for n in source if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    return stored | set(getattr(owner, "__annotations__", ()))


def checked(body: str) -> Checker:
    checker = Checker()
    checker.visit(ast.parse(body))
    return checker


CODE = [(page, number) for page in PAGES for number in range(len(blocks(page, "python")))]


@pytest.mark.parametrize(("page", "number"), CODE)
def test_a_block_uses_what_exists(page: str, number: int) -> None:
    checker = checked(blocks(page, "python")[number])
    assert not checker.problems


def test_every_row_of_the_table_of_apis_has_lines() -> None:
    """Each section of the page has code, and the code of each Python section calls the package."""
    sections = text("docs/which-api.md").split("\n## ")[2:]
    assert len(sections) == 11
    for section in sections:
        assert "```" in section, section
    assert all(checked(body).calls for body in blocks("docs/which-api.md", "python"))


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("from sglang_reshard import WeightSender\nWeightSender(url, admin_key=1)", "takes no admin_key"),
        (
            "from sglang_reshard import WeightSender\ns = WeightSender(url)\ns.update(m, verified=1)",
            "takes no verified",
        ),
        ("from sglang_reshard import WeightSender\ns = WeightSender(url)\ns.send(m)", "has no send"),
        ("from sglang_reshard import ReshardPlan\nReshardPlan.build(a)", "has no build"),
        ("from sglang_reshard import RemoteEngine\nself.e = RemoteEngine(u)\nself.e.pull()", "has no pull"),
    ],
)
def test_a_name_that_does_not_exist_is_found(body: str, problem: str) -> None:
    assert problem in " ".join(checked(body).problems)
