"""docs/reference/errors.md: the exceptions, from `sglang_reshard.errors`, and what to do about each."""

from __future__ import annotations

import inspect

from sglang_reshard import errors
from sglang_reshard.errors import ReshardError
from tools.website import fields, markdown

# Exception -> the weights that are live afterwards, and what to do.
AFTERWARDS = {
    "ReshardError": (
        "old, unless a subclass says otherwise",
        "Read the message: it ends with what to do. `error.problem` and `error.cure` are its two parts. Catch this "
        "class to catch all of the others.",
    ),
    "Unsupported": (
        "old",
        "Change the configuration as the message says. A repetition fails in the same way.",
    ),
    "Mismatch": (
        "old",
        "Compare the two sides that the message names: versions of sglang-reshard, names and shapes of tensors, "
        "arguments of the trainer ranks. A repetition fails in the same way.",
    ),
    "DeadlineExceeded": (
        "old; new if the wait was that of a [probe](../usage/probe.md)",
        "Look at the ranks that the message names: has one ended, or is it still in a step? Repeat the update. If the "
        "work needs more time, raise `timeout_s`.",
    ),
    "TornWeights": (
        "none: the engine refuses requests",
        "Repeat the update, on all trainer ranks. The first one that succeeds restores the engine. With `staged=True` "
        "a failure in transfer leaves the old weights.",
    ),
    "WeightsMissing": (
        "none: the engine refuses requests until it has some",
        "Update the engine. To have [dummy weights](../reliability.md#no-weights-yet) answer requests, set "
        "`SGLANG_RESHARD_SERVE_DUMMY=1` in its environment.",
    ),
    "EngineRefused": (
        "old",
        'Read the engine\'s message and its log. `MultiEngineSender.update(on_failure="exclude")` goes on without it.',
    ),
    "EngineUnreachable": (
        "old, or torn, and then the engine knows",
        "Check that the server is up and that its URL is right: `sglang-reshard doctor --url URL`. Repeat the update, "
        "or write a snapshot with `Snapshots.update_or_write`.",
    ),
    "Aborted": (
        "old, or torn, and then the engine knows",
        "Look for the error of the rank that the message names. Start that rank again, and make a new sender: a "
        "session does not outlive a trainer rank.",
    ),
    "PeerDisconnected": (
        "as the error says that the update fails with",
        "Look for the error of the rank that has disconnected. Ranks raise this one among themselves; the update fails "
        "with another.",
    ),
    "ConnectionLost": (
        "old, or torn, and then the engine knows",
        "Look at trainer rank 0, which hosts the session. Start the trainer again. A `ModuleReceiver` calls `init` "
        "with the metadata of the next `ModuleSender`.",
    ),
    "Unauthorized": (
        "old",
        "Pass the server's `--api-key` as `api_key` and its `--admin-api-key` as `admin_api_key`.",
    ),
    "EngineDied": (
        "none",
        "Shut the embedded engine down, and start a new one. Its log has the reason.",
    ),
    "ProbeMismatch": (
        "new: they are live and serving",
        "Look at `error.reports`: which token, sequence and data parallel rank differ most. "
        "[Probes](../usage/probe.md) lists causes.",
    ),
}

_INTRODUCTION = """\
All exceptions that the package raises on purpose derive from `sglang_reshard.errors.ReshardError`. A failed update
raises on every trainer rank. The message says what is wrong, which tensor or rank, and what to do;
[troubleshooting](../troubleshooting.md) lists messages. `TypeError` is raised for an option that does not exist, and
`ValueError` for the arguments of a `Probe` that cannot be probed.

`RemoteEngine` raises `TornWeights`, `WeightsMissing`, `Unauthorized`, `Unsupported` or `EngineRefused` for the
[status codes](http.md#status-codes) of a server, and `EngineUnreachable` if there is no answer."""


def exceptions() -> dict[str, type[ReshardError]]:
    """Returns the exceptions of the package, in the order of their definition."""
    found = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}
    return {name: kind for name, kind in found.items() if issubclass(kind, ReshardError)}


def page() -> str:
    blocks = [_INTRODUCTION, _overview()]
    for name, kind in exceptions().items():
        docstring = inspect.getdoc(kind) or ""
        live, cure = AFTERWARDS[name]
        base = kind.__bases__[0].__name__
        derived = f"[`{base}`](#{base.lower()})" if base in exceptions() else f"`{base}`"
        blocks += [
            f"## {name}",
            fields.opening(docstring),
            f"- Derives from {derived}\n- Live weights: {live}\n- What to do: {cure}",
        ]
        attributes = fields.descriptions(docstring)
        if attributes:
            rows = [[f"`{field}`", markdown.cell(text)] for field, text in attributes.items()]
            blocks.append(markdown.table(["attribute", ""], rows))
    return markdown.page("Exceptions", *blocks)


def _overview() -> str:
    rows = [[f"[`{name}`](#{name.lower()})", AFTERWARDS[name][0]] for name in exceptions()]
    return markdown.table(["exception", "weights that are live afterwards"], rows)
