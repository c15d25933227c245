"""Reads the package's source files, as syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
FOLDERS = ("python/sglang_reshard", "patches", "verl_integration")


@cache
def texts() -> dict[str, str]:
    """Returns path within the repository -> text, of every file of the package."""
    paths = [path for folder in FOLDERS for path in sorted((REPOSITORY / folder).rglob("*.py"))]
    return {path.relative_to(REPOSITORY).as_posix(): path.read_text() for path in paths}


@cache
def tree(path: str) -> ast.Module:
    """Returns the syntax tree of one file of the package."""
    return ast.parse(texts()[path])


def trees(*words: str) -> Iterator[ast.Module]:
    """Yields the syntax trees of the files that contain one of these words."""
    for path, text in texts().items():
        if any(word in text for word in words):
            yield tree(path)


def strings(tree: ast.AST) -> Iterator[str]:
    """Yields the strings of a tree, but no docstring."""
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Constant) and isinstance(child.value, str) and not isinstance(node, ast.Expr):
                yield child.value
