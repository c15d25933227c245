"""The test oracle: the weights that stock SGLang would have, for tests and benchmarks to compare with.

digests  digests of all live tensors of a model, in this process or inside a live engine
stock    those digests for every engine rank after a stock `load_weights` of a checkpoint
http_engine  a server, as `read_live_digests` takes an engine
replay   runs a traced program on the full checkpoint, in one process
"""

from sglang_reshard.cli.plan.sglang_model import build_rank, choose_code_paths
from sglang_reshard.selftest.digests import digests, read_live_digests, write_live_digests
from tools.oracle.replay import replay
from tools.oracle.stock import stock_digests

__all__ = [
    "build_rank",
    "choose_code_paths",
    "digests",
    "read_live_digests",
    "replay",
    "stock_digests",
    "write_live_digests",
]
