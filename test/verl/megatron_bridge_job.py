"""Run by test_megatron_bridge.py: as megatron_job.py, with Megatron-Bridge itself and Transformer Engine's names."""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any

from support import megatron_bridge_env


def main(cases: list[dict[str, Any]]) -> None:
    megatron_bridge_env.use()
    import megatron_job  # with the transformers of that environment
    from support.transformer_engine_names import rename

    AutoBridge = megatron_bridge_env.auto_bridge()

    def bridge(case: Any, model: Any, models: list[Any]) -> Any:
        for chunk in models if case.kind != "llama" else ():
            rename(chunk)
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            made = AutoBridge.from_hf_pretrained(folder)
            made.get_conversion_tasks(models)  # reads the names in the folder, and keeps them
        return made

    megatron_job.main([(megatron_job.Case(**case), bridge) for case in cases])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
