"""docs/reference is what the code says: tables are the generator's output, and the pages name all that the code has."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

import sglang_reshard
from sglang_reshard import errors
from sglang_reshard.errors import ReshardError
from sglang_reshard.gpu.rank_info import NCCL_SETTINGS
from sglang_reshard.patches import http_server, metrics
from sglang_reshard.patches.launch import TORCHRUN_VARIABLES
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq
from sglang_reshard.route_table import ROUTES
from support import documents
from support.documents import DOCUMENTS, ROOT, blocks, constants, table, text
from tools import marked
from tools.website import fields, json_types, pages

HTTP, SETTINGS, ERRORS = "docs/reference/http.md", "docs/reference/settings.md", "docs/reference/errors.md"
METRICS = "docs/reference/metrics.md"
# What looks like the name of a variable in files that read the environment.
NOT_VARIABLES = {"CPU", "GPU", "NCCL", "GET", "POST", "DONE", "ERR", "READ", "UCX"}
ENVIRONMENT = {"environ", "getenv", "envvar", "environment", "changed_environment"}
VARIABLE = re.compile(r"[A-Z][A-Z0-9]+(_[A-Za-z0-9]+)*")


@pytest.mark.parametrize(("page", "name"), pages.tables(), ids="-".join)
def test_a_table_is_the_generators_output(page: str, name: str) -> None:
    written = marked.read(pages.path(page), name)
    assert written == pages.tables()[page, name]().strip("\n"), "run python -m tools.website.pages"


def test_every_table_between_comments_is_generated() -> None:
    found = {
        (path.stem, name)
        for path in pages.FOLDER.glob("*.md")
        for name in re.findall(r"<!-- ([\w-]+): begin -->", path.read_text())
    }
    assert found == set(pages.tables())


def first_codes(document: str, heading: str) -> set[str]:
    return {re.search(r"`([^`]+)`", row[0])[1] for row in table(document, heading)}


# -- HTTP endpoints


def routes() -> Iterator[tuple[str, str]]:
    """Yields method and path, and the type of the request, of each route that the server gets, by its source."""
    tree = ast.parse(inspect.getsource(http_server))
    paths = dict(constants(tree))
    handlers = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "add":
            where, handler = node.args[0], handlers[ast.unparse(node.args[1])]
            path_of = paths[where.id] if isinstance(where, ast.Name) else ast.literal_eval(where)
            read = [n for n in ast.walk(handler) if isinstance(n, ast.Call) and ast.unparse(n.func) == "_message"]
            method = next((ast.literal_eval(keyword.value) for keyword in node.keywords if keyword.arg == "by"), "POST")
            yield f"{method} {path_of}", ast.unparse(read[0].args[1]) if read else "none"


def endpoints() -> list[tuple[str, str, str]]:
    """Returns method and path, request and answer of each row of the page's table."""
    rows = table(HTTP, "# HTTP endpoints")
    return [(re.search(r"`([^`]+)`", row[0])[1], *(re.sub(r"\[|\].*", "", cell) for cell in row[1:3])) for row in rows]


def test_the_endpoints_are_those_of_the_server() -> None:
    assert [(where, request) for where, request, _ in sorted(endpoints())] == sorted(routes())
    for where, request, answer in endpoints():
        section = text(HTTP).split(f"\n## `{where}`\n")[1].split("\n## ")[0]
        named = [f"[{name}](#{name.lower()})" if name != "none" else name for name in (request, answer)]
        assert f"- Request: {named[0]}\n- Answer: 200 {named[1]}" in section


def test_the_answers_are_those_that_the_clients_read() -> None:
    """A client's method names the path and the type of its answer in one call."""
    read = {}
    for file in ("protocol/server_client.py", "api/remote_engine.py"):
        for node in ast.walk(ast.parse((ROOT / "python/sglang_reshard" / file).read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "self._decoded":
                called, kind = ast.unparse(node.args[0]), ast.unparse(node.args[1])
                read |= {where: kind for where in re.findall(r"'(/\w+)'", called)}
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "self._outcome":
                read[ast.literal_eval(node.args[0])] = "DistributedUpdateWeightsOutput"
    assert read == {where.split()[1]: answer for where, _, answer in endpoints() if answer != "none"}


def test_limits_and_transports_of_the_page_are_those_of_the_code() -> None:
    assert f"at most {http_server._MAX_BODY_BYTES // 2**20} MiB" in text(HTTP)
    assert '`"auto"` or one of ' + ", ".join(f'`"{name}"`' for name in ROUTES) + "." in " ".join(text(HTTP).split())


def test_every_message_of_an_endpoint_is_described() -> None:
    named = {name for _, *names in endpoints() for name in names} - {"none"}
    assert {kind.__name__ for kind in json_types.MESSAGES} == named


# -- environment variables


def variables_of_the_code() -> set[str]:
    """Returns the names of all environment variables in files of the package that use the environment, and NCCL's."""
    found = set(NCCL_SETTINGS)
    for tree in documents.trees_of_the_code(*ENVIRONMENT):
        nodes = list(ast.walk(tree))
        if not any(getattr(node, name, None) in ENVIRONMENT for node in nodes for name in ("attr", "id", "arg")):
            continue
        known = dict(constants(tree))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        strings = [n.value for n in nodes if isinstance(n, ast.Constant) and id(n) not in docstrings]
        named = {value for value in strings if isinstance(value, str) and VARIABLE.fullmatch(value)}
        for node in nodes:
            if isinstance(node, ast.keyword) and node.arg == "envvar" and isinstance(node.value, ast.JoinedStr):
                named.add("".join(_part(part, known) for part in node.value.values))
        found |= named - NOT_VARIABLES
    return found


def _part(part: ast.expr, known: Mapping[str, Any]) -> str:
    if isinstance(part, ast.FormattedValue) and isinstance(part.value, ast.Name):
        return str(known.get(part.value.id, ""))
    return str(part.value) if isinstance(part, ast.Constant) else ""


def test_every_environment_variable_of_the_code_is_told() -> None:
    headings = ("## Environment variables", "### Of commands", "### Set for processes that are started")
    listed = {name for heading in headings for name in first_codes(SETTINGS, heading)}
    assert variables_of_the_code() == listed | {*NCCL_SETTINGS, *TORCHRUN_VARIABLES}


def test_a_new_variable_in_the_code_would_be_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By every way in which the code names one."""
    code = 'import os\n_A = "NEW_A"\nfor n in ("NEW_B", _A):\n    os.environ.get(n)\nOption(envvar=f"{_A}_FILE")'
    monkeypatch.setattr(documents, "trees_of_the_code", lambda *_: [ast.parse(code)])
    assert {"NEW_A", "NEW_B", "NEW_A_FILE"} <= variables_of_the_code()


# -- exceptions

EXCEPTIONS = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, ReshardError)
}


def test_every_exception_has_a_section_and_a_row() -> None:
    assert re.findall(r"^## (\w+)$", text(ERRORS), re.MULTILINE) == list(EXCEPTIONS)
    assert [row[0] for row in table(ERRORS, "# Exceptions")] == [f"[`{name}`](#{name.lower()})" for name in EXCEPTIONS]


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_an_exception_is_described_as_in_the_code_and_has_a_cure(name: str) -> None:
    docstring, base = inspect.getdoc(EXCEPTIONS[name]) or "", EXCEPTIONS[name].__bases__[0].__name__
    section = text(ERRORS).split(f"\n## {name}\n")[1].split("\n## ")[0]
    live = dict(row[:2] for row in table(ERRORS, "# Exceptions"))[f"[`{name}`](#{name.lower()})"]
    derived = f"[`{base}`](#{base.lower()})" if base in EXCEPTIONS else f"`{base}`"
    assert section.strip().startswith(fields.opening(docstring))
    assert f"- Derives from {derived}\n- Live weights: {live}\n- What to do: " in section
    for field, description in fields.descriptions(docstring).items():
        assert f"| `{field}` | {description} |" in section


def test_the_live_weights_are_those_of_the_table_of_options() -> None:
    """Both pages say which errors leave weights that cannot serve."""
    torn = {row[0].split("`")[1] for row in table(ERRORS, "# Exceptions") if re.match(r"none|.*torn", row[1])}
    rows = table("docs/usage/options.md", "## Errors")
    assert {row[0].strip("`") for row in rows if "torn" in row[2] or row[2].startswith("none")} == torn


# -- metrics and spans


def calls(*suffixes: str) -> Iterator[ast.Call]:
    for tree in documents.trees_of_the_code("span(", "set_attributes("):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(suffixes):
                yield node


def test_the_spans_are_those_of_the_code() -> None:
    found = set()
    for name in (call.args[0] for call in calls("span") if call.args):
        if isinstance(name, ast.JoinedStr):
            found.add(re.sub(r"\{\w+\}", lambda m: m[0][1:-1].upper(), ast.unparse(name)[2:-1]))
        elif isinstance(name, ast.Constant):
            found.add(str(name.value))
    assert found == first_codes(METRICS, "## Spans")


def test_the_attributes_of_spans_are_those_of_the_code() -> None:
    """Those given as `**labels` are of `DistributedUpdateWeightsReq.labels`."""
    given = {k.arg for call in calls("spans.span", "spans.set_attributes") for k in call.keywords} - {None, "parent"}
    names = DistributedUpdateWeightsReq.labels.__code__.co_consts
    labels = {name for const in names for name in (const if isinstance(const, tuple) else (const,))}
    told = {name.removeprefix("sglang_reshard.") for name in first_codes(METRICS, "### Attributes")}
    assert given | {"session", "update", "version"} == told
    assert {"session", "update", "version"} <= labels


def test_the_buckets_of_the_page_are_those_of_the_code() -> None:
    assert ", ".join(f"{edge:g}" for edge in metrics._SECONDS) + " seconds" in " ".join(text(METRICS).split())


# -- Python names


def listed_names() -> set[tuple[str, str]]:
    return {(module, name) for _, module, names in pages.api() for name in names}


def test_the_api_has_every_public_name() -> None:
    listed = {name for module, name in listed_names() if module == "sglang_reshard"}
    assert listed == set(sglang_reshard.__all__) - {"__version__"}


def test_every_name_of_the_api_has_an_example() -> None:
    examples = re.findall(r"^<!-- (\w+): end -->\n\n```python$", text("docs/reference/api.md"), re.MULTILINE)
    assert examples == [name for _, _, names in pages.api() for name in names]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_api_has_every_name_that_documents_import(document: str) -> None:
    """But the host of tests, which has a page of its own."""
    imported = {
        (node.module, alias.name)
        for body in blocks(document, "python")
        for node in ast.walk(ast.parse(body))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang_reshard")
        for alias in node.names
    }
    others = {("sglang_reshard.testing", "cpu_host")}
    raised = {(module, name) for module, name in imported if module == "sglang_reshard.errors"}
    assert imported - raised - others <= listed_names()


def test_fields_are_found_in_a_docstring() -> None:
    docstring = "One thing.\n\nfirst, second   both, and\n                more\nlast  it  \n\nRaises Mismatch."
    assert fields.descriptions(docstring) == {"first": "both, and more", "second": "both, and more", "last": "it"}
    assert fields.opening(docstring) == "One thing."
    assert [type(part).__name__ for part in fields.parts(docstring)] == ["Paragraph", "Fields", "Paragraph"]
