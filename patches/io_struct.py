"""sglang.srt.managers.io_struct: envelopes that carry this package's messages between SGLang's processes.

SGLang's processes exchange subclasses of its `BaseReq`. The messages inside are encoded msgspec structs, so that they
are typed and validated at both ends, independently of SGLang's handling of an envelope.
"""

from __future__ import annotations

from typing import TypeVar

from sglang.srt.managers.io_struct import BaseReq

from sglang_reshard.patches.sglang_versions import ipc_message
from sglang_reshard.protocol.messages import (
    DistributedUpdateWeightsOutput,
    DistributedUpdateWeightsReq,
    ShareWeightsReq,
    Step,
    StockLoadReq,
    decode,
    encode,
)

T = TypeVar("T")
Asked = DistributedUpdateWeightsReq | ShareWeightsReq | StockLoadReq


@ipc_message
class UpdateWeightsDistributedReqInput(BaseReq):
    """Carries the request of an update through SGLang; with the steps "share" and "loaded", others."""

    payload: bytes = b""
    step: Step = "update"

    @classmethod
    def of(cls, request: Asked, step: Step) -> UpdateWeightsDistributedReqInput:
        return cls(payload=encode(request), step=step)

    def open(self, kind: type[T]) -> T:
        return decode(self.payload, kind)


@ipc_message
class UpdateWeightsDistributedReqOutput(BaseReq):
    payload: bytes = b""

    @classmethod
    def of(cls, output: DistributedUpdateWeightsOutput) -> UpdateWeightsDistributedReqOutput:
        return cls(payload=encode(output))

    def open(self) -> DistributedUpdateWeightsOutput:
        return decode(self.payload, DistributedUpdateWeightsOutput)
