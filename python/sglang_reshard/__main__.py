"""The command line, as `sglang-reshard`: python -m sglang_reshard."""

from sglang_reshard.cli.main import app

app(prog_name="sglang-reshard")
