"""docs/reference is what the code says: the pages are the generator's output, and the generator misses nothing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq
from support.documents import DOCUMENTS, blocks
from website import api_page, errors_page, fields, http_page, json_types, metrics_page, settings_page, sources
from website.pages import FOLDER, PAGES, path

HTTP_SERVER, CLIENT = "patches/http_server.py", "python/sglang_reshard/protocol/server_client.py"


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_the_generators_output(name: str) -> None:
    assert path(name).read_text() == PAGES[name](), "run python -m website.pages"


def test_every_page_of_the_folder_is_generated_or_the_index() -> None:
    assert {p.stem for p in FOLDER.glob("*.md")} == {*PAGES, "README"}


def routes() -> Iterator[tuple[str, str, str | None]]:
    """Yields method, path and the type of the request of each route that the server gets, by its source."""
    tree = sources.tree(HTTP_SERVER)
    paths = dict(settings_page.constants(tree))
    handlers = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "add":
            where, handler = node.args[0], handlers[ast.unparse(node.args[1])]
            path_of = paths[where.id] if isinstance(where, ast.Name) else ast.literal_eval(where)
            read = [n for n in ast.walk(handler) if isinstance(n, ast.Call) and ast.unparse(n.func) == "_message"]
            method = next((ast.literal_eval(k.value) for k in node.keywords if k.arg == "by"), "POST")
            yield method, path_of, ast.unparse(read[0].args[1]) if read else None


def test_the_endpoints_are_those_of_the_server() -> None:
    told = {(e.method, e.path, e.request.__name__ if e.request else None) for e in http_page.ENDPOINTS}
    assert told == set(routes())
    assert len(told) == len(http_page.ENDPOINTS)


def test_the_answers_are_those_that_the_clients_read() -> None:
    """A client's method names the path and the type of its answer in one call."""
    read = {}
    for file in (CLIENT, "python/sglang_reshard/api/remote_engine.py"):
        for node in ast.walk(sources.tree(file)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "self._decoded":
                called, kind = ast.unparse(node.args[0]), ast.unparse(node.args[1])
                read |= {where: kind for where in re.findall(r"'(/\w+)'", called)}
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "self._outcome":
                read[ast.literal_eval(node.args[0])] = "DistributedUpdateWeightsOutput"
    answers = {e.path: e.answer.__name__ for e in http_page.ENDPOINTS if e.answer}
    assert read == answers


@pytest.mark.parametrize("kind", http_page.messages(), ids=lambda kind: kind.__name__)
def test_every_field_of_a_message_is_told_once(kind: type) -> None:
    rows = json_types.table(kind, http_page.inherited(kind))[2:]
    names = [re.match(r"\| `(\w+)`", row)[1] for row in rows]
    assert names == list(kind.__struct_encode_fields__)
    assert all(row.split(" | ")[3].strip(" |") for row in rows)


def test_every_environment_variable_of_the_code_is_told() -> None:
    assert settings_page.variables_of_the_code() == settings_page.variables_of_the_page()


def test_a_new_variable_in_the_code_would_be_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By every way in which the code names one."""
    code = 'import os\n_A = "NEW_A"\nfor n in ("NEW_B", _A):\n    os.environ.get(n)\nOption(envvar=f"{_A}_FILE")'
    monkeypatch.setattr(sources, "trees", lambda *_: [ast.parse(code)])
    assert {"NEW_A", "NEW_B", "NEW_A_FILE"} <= settings_page.variables_of_the_code()


def test_every_exception_has_a_cure() -> None:
    assert errors_page.exceptions().keys() == errors_page.AFTERWARDS.keys()


def test_the_live_weights_are_those_of_the_table_of_options() -> None:
    """Both pages say which errors leave weights that cannot serve."""
    torn = {name for name, (live, _) in errors_page.AFTERWARDS.items() if "torn" in live or live.startswith("none")}
    text = (FOLDER.parent / "usage" / "options.md").read_text().split("## Errors")[1].split("\n## ")[0]
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith("| `")]
    assert {row[0].strip(" `") for row in rows if "torn" in row[2] or row[2].strip().startswith("none")} == torn


def test_the_spans_are_those_of_the_code() -> None:
    assert metrics_page.spans_of_the_code() == set(metrics_page.SPANS)


def test_the_attributes_of_spans_are_those_of_the_code() -> None:
    names = DistributedUpdateWeightsReq.labels.__code__.co_consts
    labels = {name for const in names for name in (const if isinstance(const, tuple) else (const,))}
    assert metrics_page.attributes_of_the_code() | {"session", "update", "version"} == set(metrics_page.ATTRIBUTES)
    assert {"session", "update", "version"} <= labels


def test_the_api_has_every_public_name() -> None:
    listed = {name for module, name in api_page.listed() if module == "sglang_reshard"}
    assert listed == api_page.public()


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
    errors = {(module, name) for module, name in imported if module == "sglang_reshard.errors"}
    assert imported - errors - others <= api_page.listed()


def test_fields_are_found_in_a_docstring() -> None:
    docstring = "One thing.\n\nfirst, second   both, and\n                more\nlast  it  \n\nRaises Mismatch."
    assert fields.descriptions(docstring) == {"first": "both, and more", "second": "both, and more", "last": "it"}
    assert fields.opening(docstring) == "One thing."
    assert [type(part).__name__ for part in fields.parts(docstring)] == ["Paragraph", "Fields", "Paragraph"]
