"""Python blocks of the documents run as they are printed, where two trainer ranks, servers and modules are enough."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_reshard.selftest import tiny_model
from sglang_reshard.testing import cpu_host
from support.documents import DOCUMENTS
from support.servers import launch, serving
from support.trainers import run_trainers
from support.typed_blocks import typed_blocks

pytestmark = [pytest.mark.engine]
KEY = "the admin's key"
# A part of a block, and why it is not run here. mypy checks these blocks, too.
LEFT = {
    "tp_size=": "the engine needs GPUs, or arguments of cpu_host",
    'backend="nccl"': "needs GPUs",
    'transport="nixl"': "needs NIXL",
    "prefill, decode": "needs a pair of servers for prefill and decode",
    "deepspeed.initialize": "is part of train_zero3.py, which test_http_example.py runs",
    "listing.of": "is part of train_megatron.py, which test_http_example.py runs",
    "visual": "each line is for another model",
    "STANDALONE": "each line is for another engine",
    "lora": "needs a server for adapters; test_lora_served.py",
    "peft": "needs PEFT's model; test_lora_served.py",
    "adapter_tensors": "needs an adapter; test_lora_served.py",
    "merge_adapter": "needs PEFT's model; test_lora_served.py",
    "LoraConfig": "is PEFT's",
    "send_to": "needs vLLM; test/other_engines",
    "TransformerReceiver": "needs SGLang's diffusion engine; test/other_engines",
    "adapter.to_hf": "needs torchtitan's model; test_source_conversion.py has a stand-in",
    "without_norms": "needs a trainer's own conversion; test_source_conversion.py",
    "of_this_rank": "needs a trainer's own conversions; docs/usage/weights.md has the whole",
    "import ray": "needs a cluster",
    "session.address, trainer_rank": "trainer rank 0 alone runs its first line; several-engines.md has the whole",
    "answer.torn": "a request is made by a sender",
    "ModuleReceiver, ModuleSender": "has both ends, which are two processes",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small, with a vocabulary that has the tokens of the documents."""
    folder = tmp_path_factory.mktemp("documents") / "model"
    tiny_model.save(folder, 2, 1)
    config = tiny_model.config(2, 1)
    config.vocab_size, config.hidden_size, config.intermediate_size = 32_000, 64, 128
    config.save_pretrained(folder)
    return folder


def test_every_block_runs_or_says_why_not(model: Path, tmp_path: Path) -> None:
    folder = model.parent
    blocks = [(document, line, body) for document in DOCUMENTS for line, body in typed_blocks(document)]
    left = {f"{document}:{line}" for document, line, body in blocks if any(part in body for part in LEFT)}
    assert all(any(part in body for _, _, body in blocks) for part in LEFT)
    command = launch(model, 1, "--api-key", KEY, "--admin-api-key", KEY)
    environment = cpu_host.environment(1)
    with serving(command, environment, folder / "log") as url, serving(command, environment, folder / "log2") as other:
        # In the place of what is the reader's: servers, an interface, a model, keys, and how long it takes.
        told = {"https://gpu7:30000": url, "http://gpu7:30000": url, "http://engine:30000": url,
                "http://127.0.0.1:30000": url, "https://gpu8:30000": other, "http://gpu9:30000": other,
                "10.0.0.1": "127.0.0.1", "/models/Qwen3-8B": str(model), "range(100)": "range(2)",
                "api_key=...": "api_key=key", '"..."': repr(KEY)}  # fmt: skip
        ready = []
        for document, line, body in blocks:
            if f"{document}:{line}" not in left:
                own = {"/shared/run-1": str(tmp_path / document.replace("/", "-"))}
                for printed, here in (told | own).items():
                    body = body.replace(printed, here)
                ready.append((document, line, body))
        file = tmp_path / "blocks.json"
        file.write_text(json.dumps(ready))
        given = {"file": str(file), "urls": [url, other], "key": KEY, "model": str(model)}
        ran = run_trainers(2, "documents_job:run_all", tmp_path, deadline_s=600, **given)
    for rank in ran:
        assert sorted({f"{document}:{line}" for document, line, _ in ready} - set(rank)) == []
