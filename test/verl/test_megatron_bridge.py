"""As test_megatron.py, with Megatron-Bridge itself: its own registries and converters are what is traced.

Of Qwen3.5, whose model needs a GPU, its layers: Gated DeltaNet, gated attention, norms stored less one.
"""

from pathlib import Path

import pytest

from support.megatron_bridge_env import FOLDERS
from support.scripts import answers
from support.trainer_rows import shown
from test_megatron import check

pytestmark = [pytest.mark.sweep]
JOBS, OF_LAYERS = Path(__file__).parent, "0.6.2"
# Of these architectures Llama's registry alone knows Megatron-Core's names without Transformer Engine.
CASES = {
    "tp2 pp2, own names": {"kind": "llama", "tp": 2, "pp": 2},
    "tp2 pp2 vp2 tied, own names": {"kind": "llama", "tp": 2, "pp": 2, "vp": 2, "layers": 4, "tied": True},
    "tp2": {"kind": "qwen3", "tp": 2},
    "tp2 bias tied": {"kind": "qwen2", "tp": 2, "tied": True},
    "tp2 inside a group": {"kind": "qwen2", "tp": 2, "groups": 1},
    "tp2 pp2 tied": {"kind": "qwen3", "tp": 2, "pp": 2, "tied": True},
    "tp2 pp2 vp2": {"kind": "qwen3", "tp": 2, "pp": 2, "vp": 2, "layers": 4},
    "pp4 vp2 tied": {"kind": "qwen2", "pp": 4, "vp": 2, "layers": 8, "tied": True},
    "tp2 ep2 etp2": {"kind": "qwen3_moe", "tp": 2, "ep": 2, "etp": 2},
    "pp2 ep2": {"kind": "qwen3_moe", "pp": 2, "ep": 2},
    "stacked, tp2 ep2 etp2": {"kind": "qwen3_vl_moe", "tp": 2, "ep": 2, "etp": 2, "flat": True},
    "stacked, pp2 ep2": {"kind": "qwen3_vl_moe", "pp": 2, "ep": 2, "flat": True},
    "stacked, ep4": {"kind": "qwen3_vl_moe", "ep": 4, "flat": True},
    "stacked, tp4": {"kind": "qwen3_vl_moe", "tp": 4, "etp": 4, "flat": True},
}
SIZES = {size: size for size in (1, 2, 4)}


def installed(release):
    if not FOLDERS[release].exists():
        pytest.skip("Megatron-Bridge is not installed: make setup-bridge")
    return release


@pytest.fixture(scope="module", params=FOLDERS)
def release(request):
    return installed(request.param)


@pytest.fixture(scope="module")
def results(release):
    return answers(JOBS / "megatron_bridge_job.py", CASES, release)


@pytest.fixture(scope="module")
def layers():
    return answers(JOBS / "megatron_layer_job.py", SIZES, installed(OF_LAYERS))


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_parameters_put_together_are_the_checkpoint(results, release, name, record_property):
    check(CASES[name], results[name])
    trainer = f"Megatron-Core, {CASES[name]['kind']} {name}"
    record_property("trainer", shown(trainer, f"parameters, by Megatron-Bridge {release}'s converters", "any", "read"))


@pytest.mark.parametrize("tp", SIZES)
def test_parameters_of_layers_put_together_are_the_checkpoint(layers, tp, record_property):
    assert layers[tp] == [[], [], [], []]
    trainer = f"Megatron-Core's modules by name and shape, layers of qwen3_5 tp{tp}"
    way = f"parameters, by Megatron-Bridge {OF_LAYERS}'s converters"
    record_property("trainer", shown(trainer, way, "any", "read"))
