"""Commands of the documents and examples have the options that they give."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from sglang_reshard.cli.main import app
from support.documents import DOCUMENTS, ROOT, blocks, commands

OURS = re.compile(r"^(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?sglang-reshard ")
SCRIPTS = sorted(
    str(path.relative_to(ROOT)) for path in (ROOT / "examples").rglob("*") if path.suffix in (".py", ".sh")
)


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


@pytest.mark.parametrize("script", SCRIPTS)
def test_examples_are_programs(script: str) -> None:
    text = (ROOT / script).read_text()
    if script.endswith(".py"):
        compile(text, script, "exec")
        return
    for path in re.findall(r"(?<![\w./-])((?:examples|benchmark)/[\w./-]+\.\w+)", text):
        assert Path(ROOT, path).exists(), path
