"""Reads the documents: their headings, links, commands, code blocks and tables."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = (
    "README.md",
    "RESHARDING_GUIDE.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "benchmark/README.md",
    "examples/README.md",
    "examples/http/README.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
)

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
_INLINE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_PROGRAMS = ("make ", "sglang-reshard ", ".venv/bin/", "python ", "docker ", "torchrun ", "curl ", "pip ", "sbatch ",
             "kubectl ")  # fmt: skip
# Whose docstrings say how they are run.
EXAMPLES = tuple(sorted(str(path.relative_to(ROOT)) for path in (ROOT / "examples").rglob("*.py")))


@cache
def text(document: str) -> str:
    return (ROOT / document).read_text()


def blocks(document: str, language: str) -> list[str]:
    """Returns the fenced blocks of a language; "" for those without one."""
    return [body for _, body in numbered_blocks(text(document), language)]


def numbered_blocks(whole: str, language: str) -> Iterator[tuple[int, str]]:
    """Yields each fenced block of a language in a text, and the line at which its body begins."""
    for found in _FENCE.finditer(whole):
        if found[1] == language:
            yield whole[: found.start(2)].count("\n") + 1, found[2]


def commands(document: str) -> Iterator[str]:
    """Yields every command of a document, in blocks and within lines, or of an example's docstring."""
    if document in EXAMPLES:
        bodies = re.findall(r"(?<=\n\n)(?: {4,}\S.*\n)+", ast.get_docstring(ast.parse(text(document))) or "")
    else:
        bodies = [body for language in ("", "bash", "sh") for body in blocks(document, language)]
    for body in bodies:
        for line in body.replace("\\\n", " ").splitlines():
            line = re.sub(r"\s+#.*$", "", line).strip()
            if _is_command(line):
                yield " ".join(line.split())
    for code in _INLINE.findall(_FENCE.sub("", text(document))) if document not in EXAMPLES else ():
        for part in code.split("; "):
            if _is_command(part):
                yield part


def printed(document: str, script: str) -> str:
    """Returns the one command of a document that runs a script, for a shell at the root, by this Python."""
    (line,) = {command for command in commands(document) if script in command}
    programs = {"python": sys.executable, "torchrun": f"{sys.executable} -m torch.distributed.run"}
    return re.sub(r"\.venv/bin/(python|torchrun)", lambda found: programs[found[1]], line)


def _is_command(line: str) -> bool:
    line = re.sub(r"^(?:[A-Z_]+=\S+ )+", "", line)
    return line.startswith(_PROGRAMS) or line.split(" ")[0].startswith(".venv/bin/")


def links(document: str) -> list[str]:
    return _LINK.findall(_FENCE.sub("", text(document)))


def anchors(document: str) -> set[str]:
    """Returns the anchors of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", _FENCE.sub("", text(document)), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def table(document: str, heading: str) -> list[list[str]]:
    """Returns the rows of the first table under a heading, without its head."""
    _, under = f"\n{text(document)}".split(f"\n{heading}\n", 1)
    rows: list[list[str]] = []
    for line in under.splitlines():
        if line.startswith("|"):
            rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
        elif rows:
            break
    return rows[2:]


@cache
def strings_of_the_code() -> tuple[str, ...]:
    """Returns every string of the code, adjacent ones joined; a replacement field of an f-string is a line break."""
    found = []
    for node in _nodes_of_the_code():
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
        elif isinstance(node, ast.JoinedStr):
            found.append("".join(v.value if isinstance(v, ast.Constant) else "\n" for v in node.values))
    return tuple(found)


def names_of_the_code() -> list[str]:
    """Returns the names of all classes and functions."""
    return [node.name for node in _nodes_of_the_code() if isinstance(node, ast.ClassDef | ast.FunctionDef)]


def trees_of_the_code(*words: str) -> Iterator[ast.Module]:
    """Yields the syntax trees of the package's files that contain one of these words."""
    for folder in ("python", "patches", "verl_integration"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if any(word in path.read_text() for word in words):
                yield ast.parse(path.read_text())


def constants(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yields the names of a module that stand for a string, and the string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            pairs = (
                zip(target.elts, value.elts, strict=True)
                if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
                else [(target, value)]
            )
            for name, text in pairs:
                if isinstance(name, ast.Name) and isinstance(text, ast.Constant) and isinstance(text.value, str):
                    yield name.id, text.value


def _nodes_of_the_code() -> Iterator[ast.AST]:
    for tree in trees_of_the_code(""):
        yield from ast.walk(tree)
