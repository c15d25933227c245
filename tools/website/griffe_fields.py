"""mkdocstrings: shows this project's docstrings as Markdown, with types, the examples of api.md, and true defaults."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import griffe

from tools.website.docstrings import as_markdown

_API = (Path(__file__).parents[2] / "docs/reference/api.md").read_text()
_EXAMPLE = re.compile(r"^<!-- \w+: end -->\n\n(```python\n.*?```)\n\n<!-- ::: ([\w.]+) -->$", re.MULTILINE | re.DOTALL)
_EXAMPLES = {path: example for example, path in _EXAMPLE.findall(_API)}
# Their fields may be given by name, through a TypedDict, which has no defaults.
_OPTIONS = (
    "trainer.options.SenderOptions",
    "trainer.options.UpdateOptions",
    "extras.snapshots.of_sender.SnapshotOptions",
    "protocol.messages.LoadSnapshotReq",
    "protocol.messages.PullWeightsReq",
)


class FieldLists(griffe.Extension):
    """Rewrites the docstring of every object that is loaded. After griffe's own unpack_typeddict."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is None:
            return
        typed = obj.parameters if isinstance(obj, griffe.Function) else obj.attributes.values()
        told = {of.name: str(of.annotation) for of in typed if of.annotation is not None}
        types = {name: text for name, text in told.items() if not text.startswith("Unpack")}
        first, _, rest = as_markdown(obj.docstring.value, types).partition("\n\n")
        obj.docstring.value = "\n\n".join([first, _EXAMPLES.get(obj.path, ""), rest])

    def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
        for parameter in func.parameters:
            if parameter.default == "...":
                of = (func.package[path].attributes.get(parameter.name) for path in _OPTIONS)
                parameter.default = next((field.value for field in of if field and field.value), "...")
            with suppress(AttributeError, KeyError):  # not a constant's name, or another package's
                parameter.default = func.modules_collection[parameter.default.canonical_path].value
