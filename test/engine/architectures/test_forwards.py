"""After an update an engine computes what an engine computes that has started on the same checkpoint.

Engines of SGLang's CPU code paths run a forward pass on checkpoint A, are updated to B, and run another. Logits and
every tensor that the model reaches are compared bit for bit with those of an engine that has loaded B by stock, in the
checkpoint's dtype. `make test` tries a few; `make test-all` tries all, and writes benchmark/results/forwards.json and
its column of docs/results/architectures.md.
"""

import json
import os
from pathlib import Path

import pytest

import architecture_results as results
from forward_cases import CASE, Seen, verdict
from support import sglangs, zygote
from support.scripts import run_script

SWEEP = "SGLANG_RESHARD_SWEEP" in os.environ
# One that caches its router's weight in float32, and one with post_load_weights.
FEW = ("Glm4MoeForCausalLM", "DeepseekV3ForCausalLM")
SECONDS = 3000 if SWEEP else 1500

pytestmark = [pytest.mark.engine, pytest.mark.timeout(2 * SECONDS + 100)]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    def cases(folder):
        script = Path(__file__).with_name("forward_cases.py")
        lines = run_script(script, str(folder), *(() if SWEEP else FEW), timeout_s=SECONDS)
        return dict(json.loads(line.removeprefix(CASE)) for line in lines if line.startswith(CASE))

    of_pinned = cases(tmp_path_factory.mktemp("forwards"))
    if SWEEP:
        with sglangs.chosen("newest"):
            of_newest = cases(tmp_path_factory.mktemp("newest"))
        results.save_forwards(of_pinned, of_newest)
        results.write_table()
    return of_pinned


@pytest.mark.parametrize("architecture", FEW)
def test_it_computes_what_a_fresh_engine_computes(found, architecture):
    assert found[architecture]["outcome"] == "passed", found[architecture]


def test_derived_state_is_found_and_matters(found):
    case = found["Glm4MoeForCausalLM"]
    assert case["needed"]
    assert [path.rpartition(".")[2] for path in case["derived"]] == ["_weight_fp32"] * 3
    assert not found["DeepseekV3ForCausalLM"]["derived"]


@pytest.mark.skipif(not SWEEP, reason="all architectures: make test-all")
def test_none_fails(found):
    assert {name: case["why"] for name, case in found.items() if case["outcome"] == "failed"} == {}
    assert {name: case["left"] for name, case in found.items() if case.get("left")} == {}


def test_what_was_saved_has_no_failure():
    for saved in (results.saved_forwards(), results.saved_forwards("newest")):
        assert {name: case["why"] for name, case in saved.items() if case["outcome"] == "failed"} == {}
        assert {name: case["left"] for name, case in saved.items() if case.get("left")} == {}
        assert sum(case["outcome"] == "passed" for case in saved.values()) >= 30
        assert all(case["in place"] == "passed" for case in saved.values() if case["outcome"] == "passed")


def test_a_stale_tensor_and_a_blind_comparison_are_told():
    fresh = Seen(("1", "2"), True, {"w": "1", "w32": "1"})
    right = Seen(("1", "2"), True, {"w": "1", "w32": "1"}, first=("0", "0"))
    assert verdict(fresh, right, right)["outcome"] == "passed"
    assert verdict(fresh, Seen(("1", "0"), True, right.reachable, ("0", "0")), right)["outcome"] == "failed"
    stale = verdict(fresh, Seen(fresh.logits, True, {"w": "1", "w32": "0"}, ("0", "0")), right)
    assert (stale["outcome"], "w32" in stale["why"]) == ("failed", True)
    left_behind = verdict(fresh, Seen(fresh.logits, True, right.reachable | {"more": "1"}, ("0", "0")), right)
    assert (left_behind["outcome"], "more" in left_behind["why"]) == ("failed", True)
    assert verdict(fresh, Seen(fresh.logits, True, right.reachable, fresh.logits), right)["outcome"] == "cannot"


@pytest.fixture(scope="module")
def routed(tmp_path_factory):
    script = Path(__file__).with_name("router_cases.py")
    lines = run_script(script, str(tmp_path_factory.mktemp("routers")))
    return {(architecture, kind): case for architecture, kind, case in map(json.loads, lines)}


@pytest.mark.parametrize("architecture", ["Glm4MoeForCausalLM", "Gemma4ForCausalLM"])
@pytest.mark.parametrize("kind", ["dropped", "in place"])
def test_a_router_says_what_that_of_a_fresh_model_says(routed, architecture, kind):
    """What the first forward pass keeps is dropped; where CUDA graphs may hold its address, it is computed in place."""
    case = routed[architecture, kind]
    assert case["says"] == routed[architecture, "fresh"]["says"]
    assert case["says"] != case["before"]
    assert case["stayed"] == (kind == "in place")
    assert case["remark"] == ""


@pytest.mark.parametrize("end", sglangs.ENDS)
def test_what_kernels_of_gpus_keep_is_right_or_refused(end):
    with sglangs.chosen(end):
        lines = run_script(Path(__file__).with_name("kept_cases.py"), environment={zygote.VARIABLE: "none"})
    said = {name: outcomes for name, *outcomes in map(json.loads, lines)}
    assert said.keys() == {"cutedsl_experts", *(["hyper_connection"] if end == "newest" else [])}
    for without_graphs, with_graphs in said.values():
        assert without_graphs == "right"
        assert with_graphs.startswith("refused: the first forward pass computed ")


def test_what_loading_does_to_a_weight_once_is_known_by_its_flag(routed):
    assert routed["DeepseekV4ForCausalLM", "flags"] == ["ape_converted"]
