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
from benchmark.results import Row, Rows
from benchmark.world import timed

COUNTS, UPDATES, RANK, SLOTS = (1, 10, 100), 10, 16, 8
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CONFIG = {"peft_type": "LORA", "r": RANK, "lora_alpha": 32, "target_modules": MODULES}


def tensors_of(model: Any) -> dict[str, Any]:
    """Returns an adapter of all projections of a transformers model, without values."""
    import torch

    sizes = {name: m.weight.shape for name, m in model.named_modules() if name.endswith(tuple(MODULES))}
    shapes = {name: {"A": (RANK, columns), "B": (rows, RANK)} for name, (rows, columns) in sizes.items()}
    named = {f"base_model.model.{name}.lora_{m}.weight": s for name, of in shapes.items() for m, s in of.items()}
    return {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in named.items()}


def measure(engine: Any, adapters: Any, model: Any, count: int) -> Row:
    """stock: the last adapter says what it says by SGLang's own load of the same tensors."""
    from sglang_reshard import Adapter

    sent = {f"adapter-{n}": Adapter(json.dumps(CONFIG), tensors_of(model)) for n in range(count)}

    def update() -> float:
        for adapter in sent.values():
            for tensor in adapter.tensors.values():
                tensor.normal_(std=0.05)
        return timed(lambda: adapters.update(sent))

    first, *others = (update() for _ in range(1 + UPDATES))
    name, last = list(sent.items())[-1]
    stock = f"stock-{count}"
    loaded = engine.engine.load_lora_adapter_from_tensors(stock, list(last.tensors.items()), CONFIG)
    assert loaded.success, loaded.error_message
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    said = [engine.generate(input_ids=[5, 6, 7], sampling_params=sampling, lora_path=n) for n in (name, stock, None)]
    ours, theirs, base = (answer["output_ids"] for answer in said)
    of_all = [tensor for adapter in sent.values() for tensor in adapter.tensors.values()]
    sizes = {"adapters": count, "tensors": len(of_all), "bytes": sum(tensor.nbytes for tensor in of_all)}
    seconds = {"first_seconds": first, "seconds_median": statistics.median(others)}
    return {**sizes, **seconds, "stock": ours == theirs != base}


def run() -> Rows:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import Qwen3ForCausalLM

    from benchmark.world import find_tests

    find_tests()
    from support.live_engines import LORA, live_engine

    from sglang_reshard.selftest import tiny_model

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        tiny_model.save(Path(folder, "model"), 1, 1)
        mesh, model = init_device_mesh("cpu", (1,)), Qwen3ForCausalLM(tiny_model.config(1, 1))
        slots = {"max_lora_rank": RANK, "max_loras_per_batch": SLOTS, "lora_target_modules": MODULES}
        options = {"load_format": "auto", "dtype": "bfloat16", "skip_tokenizer_init": True}
        engine = live_engine(mesh, Path(folder, "model"), loaders=(), **{**LORA, **slots, **options})
        try:
            adapters = engine.lora_adapters()
            return [measure(engine, adapters, model, count) for count in COUNTS]
        finally:
            engine.shutdown()
            dist.destroy_process_group()


def main() -> int:
    rows = run()
    pages.publish("many-adapters", "python -m benchmark.many_adapters", rows)
    return 0 if all(row["stock"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
