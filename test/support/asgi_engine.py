"""This package's routes, with its validation and its locks, over schedulers that answer as they are told to.

`Engine` has what this package looks at of SGLang's tokenizer manager. Imports SGLang: call `cpu_host.activate` before.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
from fastapi import FastAPI
from sglang.srt.utils.aio_rwlock import RWLock
from sglang.srt.utils.auth import add_api_key_middleware

from sglang_reshard.patches import http_server, io_struct, sound_weights, tokenizer_manager, weights_info
from sglang_reshard.patches.attached import attached
from sglang_reshard.patches.hooks import Checked
from sglang_reshard.protocol.messages import DistributedUpdateWeightsOutput as Output
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq, ShareWeightsReq, StockLoadReq
from sglang_reshard.protocol.validation import check_request

ADMIN_KEY = "the-admin-key"
Answer = Callable[[DistributedUpdateWeightsReq], Output]


class Connection:
    """One HTTP request, whose client may disconnect. body: of the answer"""

    def __init__(self, app: FastAPI, path: str, message: object) -> None:
        self._messages: asyncio.Queue[Any] = asyncio.Queue()
        self._messages.put_nowait({"type": "http.request", "body": json.dumps(message).encode(), "more_body": False})
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": [(b"authorization", f"Bearer {ADMIN_KEY}".encode())],
            "server": ("127.0.0.1", 80),
            "client": ("127.0.0.1", 1),
        }
        self.body = b""
        self.task = asyncio.ensure_future(app(scope, self._messages.get, self._send))

    async def _send(self, message: Any) -> None:
        self.body += message.get("body", b"")

    def disconnect(self) -> None:
        self._messages.put_nowait({"type": "http.disconnect"})


class Engine:
    """`answer` is what the schedulers make of a request that they can read, once `answers` is set."""

    def __init__(self, answer: Answer = lambda _: Output(success=False, message="it was asked")) -> None:
        self.asked: list[Any] = []
        self.answer, self.answers = answer, asyncio.Event()
        self.loaded: Callable[[StockLoadReq], Output] = lambda _: Output(success=True, message="")
        self.answers.set()
        self.versions: list[str | None] = []
        self.enable_metrics = self.is_pause = False
        self.is_pause_cond, self.lora_update_lock, self.model_update_lock = (
            asyncio.Condition(),
            asyncio.Lock(),
            RWLock(),
        )
        self.server_args = SimpleNamespace(
            pp_size=1,
            disaggregation_mode="null",
            dp_size=1,
            nnodes=1,
            enable_lora=False,
            weight_version="default",
            quantization=None,
            dist_init_addr=None,
            model_path="model",
        )
        self.model_config = SimpleNamespace(dtype="torch.float32")
        attached(self, Checked).schedulers = True
        self._reshard_trainerpresence = SimpleNamespace(find=lambda _request: None)  # requests come without one
        self.app = FastAPI()
        http_server._add_routes(self.app, self)
        self.app.add_middleware(http_server.RefusalMiddleware, manager=self)
        add_api_key_middleware(self.app, api_key=None, admin_api_key=ADMIN_KEY)

    def client(self) -> httpx.AsyncClient:
        """Raises what leaves the application: a server answers 500 then, and logs a traceback."""
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://127.0.0.1", headers=headers)

    @property
    def torn(self) -> str:
        return sound_weights.torn(self)

    @property
    def under_way(self) -> str:
        return weights_info.under_way(self)

    # -- what SGLang's tokenizer manager has

    def auto_create_handle_loop(self) -> None:
        pass

    def abort_request(self, **_: Any) -> None:
        pass

    def _update_weight_version_if_provided(self, version: str | None) -> None:
        self.versions.append(version)

    async def update_weights_distributed(self, request: DistributedUpdateWeightsReq) -> Output:
        return await tokenizer_manager.update_weights_distributed(self, request)

    async def update_weights_distributed_communicator(self, envelope: Any) -> list[Any]:
        """As a scheduler: raises nothing, and refuses what it cannot read."""
        self.asked.append(envelope)
        await self.answers.wait()
        try:
            if envelope.step == "loaded":
                output = self.loaded(envelope.open(StockLoadReq))
            elif envelope.step == "share":
                envelope.open(ShareWeightsReq)
                output = Output(success=False, message="not shared")
            else:
                check_request(request := envelope.open(DistributedUpdateWeightsReq))
                output = self.answer(request)
        except Exception as error:
            output = Output(success=False, message=f"{type(error).__name__}: {error}")
        return [io_struct.UpdateWeightsDistributedReqOutput.of(output)]
