"""Calls an SGLang server over HTTP, with the methods of `sglang.Engine`.

    engine = RemoteEngine("http://gpu7:30000", admin_api_key="...")    # in one process
    engine.check()                                                     # reachable, authorized, and of our protocol
    engine.generate(input_ids=[[1, 2, 3]], sampling_params={"max_new_tokens": 8})

`WeightSender(url)` and `VerlEngine(backend="server", url=url)` use one on trainer rank 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import msgspec

from sglang_reshard.layout.names import patterns
from sglang_reshard.nearest import check_names, check_one_of
from sglang_reshard.protocol.messages import LoadGiven, LoadSnapshotOutput, LoadSnapshotReq, PauseMode
from sglang_reshard.protocol.server_client import ADMIN_API_KEY, API_KEY, URL, ServerClient

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["ADMIN_API_KEY", "API_KEY", "URL", "RemoteEngine"]


class RemoteEngine(ServerClient):
    """A client of one server: this package's endpoints, see `ServerClient`, and SGLang's own."""

    def generate(self, prompt: list[str] | str | None = None, **arguments: Any) -> Any:
        """Calls SGLang's `Engine.generate`; tuples in its output become lists. Raises TornWeights and WeightsMissing.

        Raises Unsupported for images that cannot be sent over HTTP: pass URLs, paths on the server's host or base64.
        """
        body = {"text": prompt, **arguments}
        given = {name: value for name, value in body.items() if value is not None}
        return msgspec.json.decode(self._ask("POST", "/generate", given, self._serving).content)

    def update_weights_from_disk(self, model_path: str, weight_version: str | None = None, **arguments: Any) -> None:
        """Calls SGLang's `Engine.update_weights_from_disk`: it loads a checkpoint that its host sees."""
        body = {"model_path": model_path, "weight_version": weight_version, **arguments}
        self._ask("POST", "/update_weights_from_disk", {k: value for k, value in body.items() if value is not None})

    def load_snapshot(
        self,
        path: str,
        version: str,
        publication: int,
        *,
        allow_rollback: bool = False,
        **options: Unpack[LoadGiven],
    ) -> LoadSnapshotOutput:
        """Lets the server load a snapshot that its host sees, unless it holds later weights, see `LoadSnapshotReq`.

        options  of the load: `staged`, `ignore` and the other fields of `LoadGiven`

        Raises EngineRefused if the snapshot cannot be loaded; the old weights keep serving. Raises TornWeights if the
        load failed while weights were being written, and TypeError for an option that does not exist.
        """
        check_names("a load", options, tuple(LoadGiven.__annotations__))
        given: dict[str, Any] = dict(options)
        for name in {"ignore", "frozen", "only"} & given.keys():
            given[name] = patterns(given[name])
        request = LoadSnapshotReq(
            path=path, version=version, publication=publication, allow_rollback=allow_rollback, **given
        )
        return self._decoded(self._ask("POST", "/load_snapshot", request), LoadSnapshotOutput)

    def release_memory_occupation(self, tags: list[str] | None = None) -> None:
        """Frees the memory of "weights", of "kv_cache", or of all; requests must have ended."""
        self._ask("POST", "/release_memory_occupation", {"tags": tags})

    def resume_memory_occupation(self, tags: list[str] | None = None) -> None:
        self._ask("POST", "/resume_memory_occupation", {"tags": tags})

    def pause_generation(self, mode: PauseMode = "abort") -> None:
        """Pauses: "abort" ends all requests, "retract" and "in_place" keep them until `continue_generation`."""
        check_one_of("mode", mode, get_args(PauseMode))
        self._ask("POST", "/pause_generation", {"mode": mode})

    def continue_generation(self) -> None:
        self._ask("POST", "/continue_generation", {})

    def flush_cache(self) -> None:
        """Flushes the prefix cache. Raises EngineRefused while requests run."""
        self._ask("POST", "/flush_cache")
