"""All that the patches hold on to in SGLang is there, at both ends of the range of its versions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from sglang_reshard.patches.sglang_versions import NEWEST, OLDEST
from sglang_reshard.version import __version__
from support.server_args_page import listed
from support.sglangs import ENDS, chosen, hooks_seen

pytestmark = pytest.mark.engine
NEWER = ["tokenizer_manager.TokenizerManager.begin_weight_update", "scheduler.Scheduler.record_weight_version_change"]
OLDER = ["schedule_batch.Req.__init__"]
HOOKS_PAGE = Path(__file__).parents[2] / "docs" / "hooks.md"


@pytest.fixture(scope="module", params=ENDS)
def seen(request: pytest.FixtureRequest) -> dict[str, Any]:
    with chosen(request.param):
        return {"end": request.param, **hooks_seen()}


def test_these_are_the_ends_of_the_range(seen: dict[str, Any]) -> None:
    assert Version(seen["version"]).public == str(OLDEST if seen["end"] == "pinned" else NEWEST)
    assert "is tested with" not in seen["log"]


def test_every_hook_has_found_its_target(seen: dict[str, Any]) -> None:
    assert seen["missing"] == []
    assert seen["told"] == __version__
    assert len(seen["hooks"]) > 10
    assert all(seen["methods"])


def test_the_page_lists_every_hook(seen: dict[str, Any]) -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| (before|after|around) \|", HOOKS_PAGE.read_text(), re.MULTILINE)
    listed = {f"sglang.srt.{target}": [kind] for target, kind in rows}
    assert len(rows) == len(listed)
    for target in NEWER if seen["end"] == "pinned" else OLDER:
        del listed[f"sglang.srt.managers.{target}"]
    assert {target: sorted(set(kinds)) for target, kinds in seen["hooks"].items()} == listed
    around = {target: kinds.count("around") for target, kinds in seen["hooks"].items()}
    assert max(around.values()) == 1, "SGLang warns that the inner one of two is bypassed"


def test_a_hook_whose_target_was_renamed_is_told_of(seen: dict[str, Any]) -> None:
    """SGLang only logs it, and everything looks as if it were in place."""
    missing = "sglang.srt.managers.scheduler.Scheduler.no_such_method"
    assert seen["told of a renamed one"] == f"{__version__} without {missing}"


def test_envelopes_arrive_as_they_were_sent(seen: dict[str, Any]) -> None:
    assert seen["received"] == ["UpdateWeightsDistributedReqInput", "x", "commit"]


MODES = {
    "pp": "pp_size=2 with disaggregation_mode=decode",
    "tokenizers": "tokenizer_worker_num=2",
    "ray": "use_ray",
    "elastic": "elastic_ep_backend=nixl",
    "cache": "weight_cache_mode=daemon",
    "offload": "cpu_offload_gb=4: weights are kept elsewhere",
    "offload in groups": "offload_group_size=2: weights are kept elsewhere",
    "paged": "enable_paged_experts: weights are kept elsewhere",
    "storage": "hicache_storage_backend=file: the cache of the old weights is kept",
    "lmcache": "enable_lmcache: the cache of the old weights is kept",
    "torchao": "torchao_config=int8wo: weights are quantized",
}


def test_modes_that_cannot_work_are_refused_by_the_name_of_the_option(seen: dict[str, Any]) -> None:
    reasons = dict(seen["unsupported"])
    assert reasons.pop("none") == ""
    newer, older = {"cache", "paged"}, {"torchao"}
    other = newer if seen["end"] == "pinned" else older
    assert set(reasons) == set(MODES) - other
    for mode, reason in reasons.items():
        assert reason.startswith(MODES[mode]), reason


def test_a_flush_forgets_embeddings_of_images_too(seen: dict[str, Any]) -> None:
    assert seen["embeddings"] == [1, 0]


def test_spans_of_tokens_are_those_that_sglang_computes(seen: dict[str, Any]) -> None:
    assert seen["spans"] == ([] if seen["end"] == "pinned" else [True] * 200)


def test_every_option_of_this_version_has_been_judged(seen: dict[str, Any]) -> None:
    judged = {name for names in listed().values() for name in names}
    assert sorted(name for name in seen["options"] if name not in judged and not name.startswith("_")) == []
