"""docs/reference/http.md: the endpoints that the package adds to SGLang's server, from the messages they take."""

from __future__ import annotations

import inspect
from http import HTTPStatus
from typing import NamedTuple

import msgspec

from sglang_reshard.observability.probe_report import ProbeSummary
from sglang_reshard.patches import http_server
from sglang_reshard.protocol.messages import (
    DistributedUpdateWeightsOutput,
    DistributedUpdateWeightsReq,
    LoadSnapshotOutput,
    LoadSnapshotReq,
    PullWeightsReq,
    SharedWeights,
    ShareWeightsReq,
)
from sglang_reshard.protocol.weights_info import WeightsInfo
from sglang_reshard.route_table import ROUTES
from website import fields, json_types, markdown


class Endpoint(NamedTuple):
    """One endpoint.

    request, answer  what its bodies are; None for none
    refusal          the body of HTTP 400; None for SGLang's format of errors
    caller           who calls it in Python
    """

    method: str
    path: str
    request: type[msgspec.Struct] | None
    answer: type[msgspec.Struct] | None
    refusal: type[msgspec.Struct] | None
    caller: str
    text: str


ENDPOINTS = (
    Endpoint(
        "GET",
        "/weights_info",
        None,
        WeightsInfo,
        None,
        "`RemoteEngine.weights_info`, `VerlEngine.weights_info`",
        "Describes the live weights and the update that brought them. It asks no scheduler, so it answers while an "
        "update runs and while the weights are torn.",
    ),
    Endpoint(
        "POST",
        "/update_weights_distributed",
        DistributedUpdateWeightsReq,
        DistributedUpdateWeightsOutput,
        DistributedUpdateWeightsOutput,
        "`WeightSender.update` on trainer rank 0",
        "Starts one update and answers when it has ended. The body says where engine ranks find the trainer ranks; it "
        "has no tensor. Only a sender can write it, because the session, the layout and the handles that it names must "
        "exist. If the client "
        "disconnects, the schedulers' answer still decides which weights are live.",
    ),
    Endpoint(
        "POST",
        "/pull_weights",
        PullWeightsReq,
        DistributedUpdateWeightsOutput,
        DistributedUpdateWeightsOutput,
        "`RemoteEngine.pull_weights`, `sglang-reshard pull`",
        "Takes the live weights of another server. This server asks that one with `POST /share_weights`. It asks only "
        "hosts that `SGLANG_RESHARD_PEERS` lists, and its own. A client that disconnects cancels it.",
    ),
    Endpoint(
        "POST",
        "/share_weights",
        ShareWeightsReq,
        SharedWeights,
        None,
        "another server, on behalf of `/pull_weights`",
        "Opens a session for one other server, which reads the live weights. This server keeps serving requests.",
    ),
    Endpoint(
        "POST",
        "/load_snapshot",
        LoadSnapshotReq,
        LoadSnapshotOutput,
        None,
        "`RemoteEngine.load_snapshot`, `SnapshotFollower`, `sglang-reshard follow`",
        "Loads a snapshot that the server's host sees, unless later weights are live.",
    ),
    Endpoint(
        "POST",
        "/record_probe",
        ProbeSummary,
        None,
        DistributedUpdateWeightsOutput,
        "`WeightSender.update(probe=...)` on trainer rank 0",
        "Adds the outcome of a probe to the server's metrics. The answer is `null`.",
    ),
)

_INTRODUCTION = f"""\
The plugin adds these endpoints to SGLang's own server, at the server's own port. Nothing else of this package listens
for HTTP: trainer ranks, engine ranks and a `ModuleReceiver` meet on a control server of trainer rank 0, which has a
separate protocol ([architecture](../architecture.md)).

- Bodies are JSON, of at most {http_server._MAX_BODY_BYTES // 2**20} MiB. A field that is left out has its default, and
  an unknown field is ignored.
- All endpoints need `Authorization: Bearer KEY`, with the server's `--admin-api-key`, or its `--api-key` if it has no
  admin key. A server without keys accepts every request.
- `RemoteEngine` is the Python client of all of them but `/share_weights`. [Update a server by
  URL](../usage/server.md) shows its use."""

_STATUS = """\
| status | body | when |
|---|---|---|
| 200 | the answer | the request succeeded |
| 400 | `"success": false`, or an error | the request is malformed, was refused, or failed; `message` says why |
| 401, 403 | SGLang's | the key is wrong or missing |
| 404 | SGLang's | the plugin is not loaded there: see [troubleshooting](../troubleshooting.md) |
| 503 | an error of type `TornWeights` or `WeightsMissing` | it would depend on weights that are torn or missing |

503 is also the answer of SGLang's own endpoints while the weights are torn or there are none: those that
generate, `/health` and `/health_generate`. The next successful update ends it.

An error is in the format of SGLang's:

```json
{"error": {"message": "what is wrong; what to do", "type": "TornWeights", "code": 503}}
```

`type` is the name of the [exception](errors.md) on the server. `RemoteEngine` raises `TornWeights` and
`WeightsMissing` for those, `Unauthorized` for 401 and 403, `Unsupported` for 404, and `EngineRefused` for all else."""


def page() -> str:
    blocks = [_INTRODUCTION, _overview(), "## Status codes", _STATUS]
    for endpoint in ENDPOINTS:
        blocks += _endpoint(endpoint)
    blocks += ["## Messages", _MESSAGES]
    for kind in messages():
        blocks += [f"### {kind.__name__}", _opening(kind), "\n".join(json_types.table(kind, inherited(kind)))]
    return markdown.page("HTTP endpoints", *blocks)


_MESSAGES = f"""\
`transport` is `"auto"` or one of {", ".join(f'`"{name}"`' for name in ROUTES)}. JSON has integer keys of an object as
strings. Descriptions are those of the Python classes, where `null` is None. Where one names a module
(`landings.checked.whole_model`), it is in `python/sglang_reshard`."""


def _overview() -> str:
    rows = [
        [f"[`{e.method} {e.path}`](#{_anchor(e)})", _named(e.request), _named(e.answer), e.caller] for e in ENDPOINTS
    ]
    return markdown.table(["endpoint", "request", "answer", "called by"], rows)


def _endpoint(endpoint: Endpoint) -> list[str]:
    refused = (
        "the same kind of body with `success` false"
        if endpoint.refusal is endpoint.answer
        else f"{_named(endpoint.refusal)} with `success` false"
        if endpoint.refusal
        else "an error"
    )
    code = HTTPStatus.BAD_REQUEST.value
    statuses = f"200 {_named(endpoint.answer)}"
    if endpoint.request is not None:
        statuses += f"; {code} {refused}"
    lines = [f"- Request: {_named(endpoint.request)}", f"- Answer: {statuses}", f"- Called by: {endpoint.caller}"]
    return [f"## `{endpoint.method} {endpoint.path}`", endpoint.text, "\n".join(lines)]


def _anchor(endpoint: Endpoint) -> str:
    return f"{endpoint.method} {endpoint.path}".lower().replace(" ", "-").replace("/", "")


def _named(kind: type[msgspec.Struct] | None) -> str:
    return "none" if kind is None else f"[{kind.__name__}](#{kind.__name__.lower()})"


def messages() -> list[type[msgspec.Struct]]:
    of = (kind for e in ENDPOINTS for kind in (e.request, e.answer) if kind is not None)
    return list(dict.fromkeys(part for kind in of for part in json_types.structs(kind)))


def _opening(kind: type[msgspec.Struct]) -> str:
    return fields.opening(inspect.getdoc(kind) or "")


def inherited(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Fields that several messages share are described by the request of an update."""
    if kind not in (LoadSnapshotReq, PullWeightsReq, ShareWeightsReq):
        return {}
    return fields.descriptions(inspect.getdoc(DistributedUpdateWeightsReq) or "")
