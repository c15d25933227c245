#!/usr/bin/env python3
"""A server for a host without a GPU: SGLang's own `sglang serve`, of a small model with weights of nobody.

    .venv/bin/python examples/http/serve_on_cpu.py FOLDER [--tp-size 2] [OPTION ...]

The model's configuration and tokenizer are written to FOLDER/model: a Qwen3 of ten million parameters. Options are
those of `sglang serve`, and win: --port 30000, --api-key, --admin-api-key. On GPUs `sglang serve` needs no help.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from sglang_reshard.selftest import tiny_model
from sglang_reshard.testing import cpu_host

TRAINER_RANKS, MOST_ENGINE_RANKS = 2, 2  # that the model can be cut for


def main(folder: Path, tp_size: int, options: list[str]) -> None:
    tiny_model.save(folder / "model", TRAINER_RANKS, MOST_ENGINE_RANKS)
    arguments = ["--model-path", str(folder / "model"), "--load-format", "dummy", "--dtype", "float32"]
    arguments += ["--tp-size", str(tp_size), *cpu_host.command_line()]
    environment = {**os.environ, **cpu_host.environment(tp_size)}
    start = "from sglang.cli.main import main; main()"
    os.execve(sys.executable, [sys.executable, "-c", start, "serve", *arguments, *options], environment)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tp-size", type=int, default=1, choices=range(1, MOST_ENGINE_RANKS + 1))
    given, options = parser.parse_known_args()
    main(given.folder.absolute(), given.tp_size, options)
