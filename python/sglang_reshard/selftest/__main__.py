"""`python -m sglang_reshard.selftest`, for torchrun and srun: as `sglang-reshard selftest`, see `spanning`."""

import sys

from sglang_reshard.cli.main import app

app(["selftest", *sys.argv[1:]])
