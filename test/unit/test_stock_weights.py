"""What engine ranks are told of weights that SGLang itself has loaded or released."""

import asyncio
from types import SimpleNamespace

import pytest

from sglang_reshard.patches import stock_weights, weights_info
from test_weights_info import REQUEST


def manager(**server_args):
    return SimpleNamespace(enable_metrics=False, is_pause=False, server_args=SimpleNamespace(**server_args))


def told(it):
    request = stock_weights.told(it, REQUEST)
    return request.stock_changes, request.stock_loaded


async def stock(*_, **__):
    return True, "", None


def release(it, *tags):
    asyncio.run(weights_info.around_release(stock, it, SimpleNamespace(tags=list(tags))))


@pytest.mark.parametrize(("load_format", "first"), [("auto", (0, True)), ("dummy", (1, False))])
def test_how_the_engine_was_started_is_told(load_format, first):
    assert told(manager(load_format=load_format)) == first


def test_weights_that_are_released_are_lost_and_a_load_from_disk_brings_them():
    it = manager(load_format="dummy", enable_memory_saver=True)
    stock_weights.loaded(it)
    assert told(it) == (2, True)
    release(it, "kv_cache")
    assert told(it) == (2, True)
    release(it, "weights")
    assert told(it) == (3, False)
    release(it)  # all
    assert told(it) == (4, False)


@pytest.mark.parametrize(
    "server_args", [{"enable_memory_saver": True, "enable_weights_cpu_backup": True}, {"enable_memory_saver": False}]
)
def test_weights_of_which_there_is_a_copy_and_those_that_stay_are_not_lost(server_args):
    it = manager(load_format="auto", **server_args)
    release(it, "weights")
    assert told(it) == (0, True)
