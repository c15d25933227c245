"""SGLang's own server with one more route, for test_torn.py: POST /torn_probe {"reason": ...} tears, or heals with "".

It answers with the number of requests that the tokenizer manager has on its list.
"""

from __future__ import annotations

import sys
from typing import Any


def main() -> None:
    from sglang.srt.entrypoints import http_server
    from sglang.srt.server_args import prepare_server_args
    from starlette.responses import JSONResponse

    from sglang_reshard.patches import sound_weights

    async def probe(request: Any) -> JSONResponse:
        manager = http_server.get_global_state().tokenizer_manager
        told = await request.json()
        if told.get("reason"):
            sound_weights.mark(manager, told["reason"])
        elif "reason" in told:
            sound_weights.heal(manager)
        return JSONResponse(len(manager.rid_to_state))

    http_server.app.add_route("/torn_probe", probe, methods=["POST"])
    http_server.launch_server(prepare_server_args(sys.argv[1:]))


if __name__ == "__main__":
    main()
