"""Updates of 1, 10 and 100 LoRA adapters of rank 16 of an embedded engine: `python -m benchmark.many_adapters`.

The first update of a number of adapters plans. The seconds of the next ones are a median; every element changes before.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmark import pages
from benchmark.results import Row
from benchmark.world import find_tests, timed

COUNTS, UPDATES, RANK, SLOTS = (1, 10, 100), 10, 16, 8
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CONFIG = {"peft_type": "LORA", "r": RANK, "lora_alpha": 32, "target_modules": MODULES}


def tensors_of(model: Any) -> dict[str, Any]:
    """Returns the tensors of an adapter of all projections of a transformers model, without values."""
    sizes = {name: m.weight.shape for name, m in model.named_modules() if name.endswith(tuple(MODULES))}
    shapes = {name: {"A": (RANK, columns), "B": (rows, RANK)} for name, (rows, columns) in sizes.items()}
    named = {f"base_model.model.{name}.lora_{m}.weight": s for name, of in shapes.items() for m, s in of.items()}
    return {name: model.lm_head.weight.new_empty(shape) for name, shape in named.items()}


def measure(engine: Any, adapters: Any, model: Any, count: int) -> Row:
    """stock: the last adapter says what it says by SGLang's own load of it, and not what the base model says."""
    from sglang_reshard import Adapter

    of_each = {f"adapter-{n}": tensors_of(model) for n in range(count)}
    sent = {name: Adapter(json.dumps(CONFIG), given) for name, given in of_each.items()}
    tensors = [tensor for given in of_each.values() for tensor in given.values()]

    def update() -> float:
        for tensor in tensors:
            tensor.normal_(std=0.05)
        return timed(lambda: adapters.update(sent))

    first, *others = (update() for _ in range(1 + UPDATES))
    last = f"adapter-{count - 1}"
    stock = engine.engine.load_lora_adapter_from_tensors(f"stock-{count}", of_each[last], CONFIG)
    assert stock.success, stock.error_message
    sampling, names = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}, [last, f"stock-{count}", None]
    ours, theirs, base = (a["output_ids"] for a in engine.generate(None, sampling, [[5, 6, 7]] * 3, lora_path=names))
    row = {"adapters": count, "tensors": len(tensors), "bytes": sum(t.nbytes for t in tensors)}
    return row | {"first_seconds": first, "seconds": statistics.median(others), "stock": ours == theirs != base}


def main() -> int:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import Qwen3ForCausalLM

    from sglang_reshard.selftest import tiny_model

    find_tests()
    from support.live_engines import LORA, live_engine

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    slots = {"max_lora_rank": RANK, "max_loras_per_batch": SLOTS, "lora_target_modules": MODULES}
    with tempfile.TemporaryDirectory() as folder:
        model = Qwen3ForCausalLM(tiny_model.config(1, 1)).bfloat16()
        model.save_pretrained(folder)
        options = {**LORA, **slots, "dtype": "bfloat16", "skip_tokenizer_init": True}
        engine = live_engine(init_device_mesh("cpu", (1,)), Path(folder), **options)
    rows = [measure(engine, adapters, model, count) for adapters in [engine.lora_adapters()] for count in COUNTS]
    engine.shutdown()
    pages.publish("many-adapters", "python -m benchmark.many_adapters", rows)
    return 0 if all(row["stock"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
