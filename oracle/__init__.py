"""What stock SGLang would have done with the same weights: the yardstick of tests and of the demo.

forks.py       work in forked children, with deadlines
replay.py      a traced program carried out with the whole checkpoint at hand
rank.py        one engine rank's real model in this process
weightless.py  such a model on the meta device
fresh.py       work in a process of its own that answers line by line
digests.py     digests of all live tensors of a model, in this process or inside a live engine
stock.py       those digests for every engine rank after stock `load_weights` of a checkpoint
"""

from oracle.digests import digests, read_live_digests, write_live_digests
from oracle.replay import replay
from oracle.stock import stock_digests
from sglang_reshard.cli.plan.sglang_model import build_rank, choose_code_paths

__all__ = [
    "build_rank",
    "choose_code_paths",
    "digests",
    "read_live_digests",
    "replay",
    "stock_digests",
    "write_live_digests",
]
