"""mypy checks every Python block of the documents, and every example, against the package's own types, in one run."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from sglang_reshard import SenderOptions
from support.documents import DOCUMENTS, EXAMPLES, text
from support.typed_blocks import complaints, typed_blocks


def test_a_wrong_block_is_noticed_and_neither_documents_nor_examples_have_one(tmp_path: Path) -> None:
    written = [(document, line, body) for document in DOCUMENTS for line, body in typed_blocks(document)]
    written += [(example, 1, text(example)) for example in EXAMPLES]
    wrong = "sender.update(model, stagd=True)\nsender.send(model)\nsender.update(model).transprot\nWeightSendr(url)\n"
    found = complaints([*written, ("wrong.md", 3, wrong)], tmp_path)
    assert [line for line in found if not line.startswith("wrong.md:")] == []
    says = {line.split(":")[1]: line for line in found if ": error: " in line}
    told = {"1": "WeightSendr", "3": "stagd", "4": "send", "5": "transprot"}
    assert says.keys() == told.keys()
    assert all(f'"{name}"' in says[line] for line, name in told.items())


def engine_options(body: str) -> list[dict[str, None]]:
    """Returns the keyword arguments of each VerlEngine, which takes any for mypy, as it hands them on to SGLang."""
    calls = [node for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Call)]
    named = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "VerlEngine"]
    return [{keyword.arg: None for keyword in call.keywords if keyword.arg} for call in named]


def test_a_wrong_option_of_an_engine_is_noticed() -> None:
    (given,) = engine_options('VerlEngine(device_mesh_cpu=mesh, model_path="m", transports="p2p")')
    with pytest.raises(TypeError, match="'transports' is no option"):
        SenderOptions.split(given)


@pytest.mark.parametrize("document", [*EXAMPLES, *(d for d in DOCUMENTS if any(typed_blocks(d)))])
def test_what_mypy_lets_pass_exists(document: str) -> None:
    """For it `sglang_reshard` has any name, as names are looked up when they are asked for."""
    bodies = [text(document)] if document in EXAMPLES else [body for _, body in typed_blocks(document)]
    for given in (given for body in bodies for given in engine_options(body)):
        SenderOptions.split(given)  # raises TypeError for one that is nearly an option
    for node in (node for body in bodies for node in ast.walk(ast.parse(body))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang_reshard"):
            exec(compile(ast.Module([node], []), document, "exec"), {})
