"""Requests that hold no cache get the mark of the live weights; those that hold some keep their own."""

from types import SimpleNamespace

import pytest

from sglang_reshard.errors import Unsupported
from sglang_reshard.patches import cache_versions
from sglang_reshard.protocol.messages import BY_VERSION
from sglang_reshard.trainer.options import UpdateOptions


@pytest.fixture(autouse=True)
def _first(monkeypatch):
    monkeypatch.setattr(cache_versions, "_version", 0)


def request(key=None, pool=None):
    return SimpleNamespace(extra_key=key, req_pool_idx=pool)


def marked(it):
    cache_versions.mark(it)
    return it.extra_key


def test_nothing_is_marked_before_an_update_asks_for_it():
    assert marked(request()) is None
    assert marked(request("salt")) == "salt"


def test_requests_without_cache_are_of_the_live_weights():
    waiting, salted = request(), request("salt")
    cache_versions.begin(None)
    assert (marked(waiting), marked(salted)) == ("weights 1|", "weights 1|salt")
    assert marked(waiting) == "weights 1|"
    salted.extra_key += "|elastic"  # added by SGLang
    cache_versions.begin(None)
    assert (marked(waiting), marked(salted)) == ("weights 2|", "weights 2|salt|elastic")


_VERSIONS = 3
_LIKE_MARKS = [
    f"{start}weights {n}{end}" for start in ("", "|", "a|") for n in range(4) for end in ("", "|", "|b", "0|")
]
_NESTED = [f"weights {n}|{key}" for n in range(3) for key in (*_LIKE_MARKS, "")]


def test_no_key_of_a_client_meets_one_of_another_version_or_of_another_client():
    keys = [None, "salt", "weights", "weights ", *dict.fromkeys((*_LIKE_MARKS, *_NESTED))]
    seen = {}
    for version in range(_VERSIONS):
        for key in keys:
            assert seen.setdefault(marked(request(key)), (version, key)) == (version, key)
        cache_versions.begin(None)
    assert len(seen) == _VERSIONS * len(keys)


def test_a_retracted_request_loses_the_mark_of_its_old_version_only():
    it = request("weights 1|weights 0|")
    assert marked(it) == "weights 0|weights 1|weights 0|"
    cache_versions.begin(None)
    assert marked(it) == "weights 1|weights 1|weights 0|"


def test_a_request_that_holds_cache_keeps_its_version_until_it_is_retracted():
    it = request()
    cache_versions.begin(None)
    marked(it)
    it.req_pool_idx = 7
    cache_versions.begin(None)
    assert marked(it) == "weights 1|"
    it.req_pool_idx = None
    assert marked(it) == "weights 2|"


class RadixCacheCpp:
    pass


@pytest.mark.parametrize(
    ("options", "cache", "says"),
    [
        ({"pp_size": 2}, None, "pp_size=2"),
        ({"disaggregation_mode": "decode"}, None, "disaggregation_mode=decode"),
        ({"enable_streaming_session": True}, None, "enable_streaming_session"),
        ({}, RadixCacheCpp(), "in C++"),
        ({}, None, ""),
    ],
)
def test_engines_whose_cache_cannot_be_kept_apart_refuse(options, cache, says):
    server_args = SimpleNamespace(**{"pp_size": 1, "disaggregation_mode": "null", **options})
    it = SimpleNamespace(server_args=server_args, tree_cache=cache)
    refusal = cache_versions.refusal(it)
    assert says in refusal
    assert bool(refusal) == bool(says)


def test_a_misspelt_value_is_refused_with_all_of_them():
    for value in (True, False, BY_VERSION):
        assert UpdateOptions(flush_cache=value).flush_cache == value
    with pytest.raises(Unsupported, match=r"'by version' is not supported; use True, False or 'by_version'"):
        UpdateOptions(flush_cache="by version")
