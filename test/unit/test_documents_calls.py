"""What the documents and examples call exists as they call it: options of commands, and arguments of Python calls."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer

import sglang_reshard
from sglang_reshard import SenderOptions, UpdateOptions, VerlEngine
from sglang_reshard.cli.main import app
from sglang_reshard.extras.snapshots.of_sender import SnapshotOptions
from support.documents import DOCUMENTS, ROOT, blocks, commands

OURS = re.compile(r"^(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?sglang-reshard ")
SCRIPTS = sorted(
    str(path.relative_to(ROOT)) for path in (ROOT / "examples").rglob("*") if path.suffix in (".py", ".sh")
)
PROGRAMS = [name for name in SCRIPTS if name.endswith(".py")]
OPTIONS = SenderOptions, UpdateOptions, SnapshotOptions
CLASSES = {name: kind for name in sglang_reshard.__all__ if inspect.isclass(kind := getattr(sglang_reshard, name))}


def command_lines() -> list[str]:
    found = {line for document in DOCUMENTS for line in commands(document) if OURS.match(line)}
    for script in SCRIPTS:
        text = (ROOT / script).read_text().replace("\\\n", " ")
        found |= {line.strip() for line in text.splitlines() if OURS.match(line.strip())}
    return sorted(found)


def arguments_of(line: str) -> list[str]:
    """Returns the arguments of the command, up to a redirection or another command."""
    words = shlex.split(OURS.sub("", line), comments=True)
    ends = [n for n, word in enumerate(words) if re.fullmatch(r"\d?>>?|\||&&|;|&", word)]
    return words[: min(ends, default=len(words))]


def parse(arguments: list[str]) -> None:
    """Parses a command line with the command's own parser, and checks its values; nothing is run."""
    command: Any = typer.main.get_command(app)
    named = command.commands[arguments[0]]
    if arguments[1:] != ["--help"]:
        named.make_context(arguments[0], arguments[1:])


@pytest.mark.parametrize("line", command_lines())
def test_a_command_line_is_one_that_the_command_takes(line: str) -> None:
    arguments = arguments_of(line)
    if is_mention(line):  # of a command, or of one of its options
        command: Any = typer.main.get_command(app)
        of = command.commands.get(arguments[0], command)
        known = {name for parameter in of.params for name in (*parameter.opts, parameter.name.upper())}
        known |= set(command.commands) | {"COMMAND"}
        assert set(arguments) <= known | {"--help"}
        return
    parse(arguments)


def is_mention(line: str) -> bool:
    """Whether no block of a document has the line, and no option in it has a value."""
    in_blocks = {" ".join(part.split()) for d in DOCUMENTS for tag in ("", "bash") for part in lines_of(blocks(d, tag))}
    return line not in in_blocks and not re.search(r" --[\w-]+ [^-\s]", line)


def lines_of(bodies: list[str]) -> Iterator[str]:
    for body in bodies:
        for line in body.replace("\\\n", " ").splitlines():
            yield re.sub(r"\s+#.*$", "", line)


@pytest.mark.parametrize(
    "line", ["pull --from http://a:1 --too http://b:1", "plan qwen3-8b --source tp=4", "foo --bar"]
)
def test_a_wrong_command_line_is_noticed(line: str) -> None:
    with pytest.raises((Exception, SystemExit)):
        parse(shlex.split(line))


@pytest.mark.parametrize("document", [*DOCUMENTS, *PROGRAMS])
def test_python_calls_have_arguments_that_exist(document: str) -> None:
    bodies = [(ROOT / document).read_text()] if document in PROGRAMS else blocks(document, "python")
    assert [wrong for body in bodies for wrong in wrong_calls(body)] == []


def test_wrong_arguments_are_noticed() -> None:
    body = """
from sglang_reshard import WeightSender, VerlEngine
sender = WeightSender(url, transprot="p2p")
sender.update(model, stagd=True)
sender.update(model, staged=True, weight_version="7")
sender.send(model)
VerlEngine(device_mesh_cpu=mesh, model_path="m", transports="p2p")
"""
    wrong = [wrong.partition(":")[0] for wrong in wrong_calls(body)]
    assert wrong == ["WeightSender", "sender.update", "sender.send", "VerlEngine"]


def wrong_calls(body: str) -> Iterator[str]:
    """Yields calls of this package whose keyword arguments no function takes that may be meant."""
    tree = ast.parse(body)
    names: dict[str, Any] = dict(CLASSES)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang_reshard"):
            exec(compile(ast.Module([node], []), "a block", "exec"), names)
    made = {
        target.id: names[node.value.func.id]
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name)
        for target in node.targets
        if isinstance(target, ast.Name) and inspect.isclass(names.get(node.value.func.id))
    }
    calls = sorted((n for n in ast.walk(tree) if isinstance(n, ast.Call)), key=lambda n: (n.lineno, n.col_offset))
    for call in calls:
        meant = list(functions(call.func, names, made))
        given = {keyword.arg for keyword in call.keywords if keyword.arg}
        if meant and not any(takes(function, given) for function in meant):
            yield f"{ast.unparse(call.func)}: {sorted(given)} in {ast.unparse(call)}"


def functions(called: ast.expr, names: Mapping[str, Any], made: Mapping[str, Any]) -> Iterator[Any]:
    """Yields the functions that a call may mean; None for a method that a class does not have."""
    match called:
        case ast.Name(name) if getattr(names.get(name), "__module__", "").startswith("sglang_reshard"):
            yield names[name]
        case ast.Attribute(ast.Name(owner), method) if owner in {**made, **CLASSES}:
            yield getattr(made.get(owner) or CLASSES[owner], method, None)
        case ast.Attribute(
            ast.Name("sender" | "engine" | "receiver" | "stream" | "snapshots" | "server" | "policy"), method
        ):
            yield from (f for kind in CLASSES.values() if callable(f := getattr(kind, method, None)))  # made elsewhere


def takes(function: Any, given: set[str]) -> bool:
    """Returns whether the function has parameters, or options by name, of all these names."""
    if function is None:
        return False
    parameters = inspect.signature(function).parameters.values()
    rest = given - {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
    others = {p.name for p in parameters if p.kind is p.VAR_KEYWORD}
    if not rest or not others:
        return not rest
    if function is VerlEngine:
        with contextlib.suppress(TypeError):  # one that is nearly an option
            return bool(SenderOptions.split(dict.fromkeys(rest)))
        return False
    options = {field.name for kind in OPTIONS for field in dataclasses.fields(kind)}
    return rest <= options or not others & {"given", "options"}  # or it hands them on to SGLang


@pytest.mark.parametrize("script", SCRIPTS)
def test_examples_are_programs(script: str) -> None:
    text = (ROOT / script).read_text()
    if script.endswith(".py"):
        compile(text, script, "exec")
        return
    for path in re.findall(r"(?<![\w./-])((?:examples|benchmark)/[\w./-]+\.\w+)", text):
        assert Path(ROOT, path).exists(), path
