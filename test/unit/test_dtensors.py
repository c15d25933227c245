"""DTensors of every placement, order, mesh and dtype that torch makes: what all ranks hold is the whole tensor.

The truth is torch's own `full_tensor`, where torch has one.
"""

import pytest

from support import dtensors
from support.dtensor_rows import NAMED
from support.dtensors import REFUSED, SAME
from support.sweep import only

REFUSED_FAMILIES = {"Partial": "Partial", "MaskPartial": "MaskPartial", "complex dtypes": "complex"}


@pytest.mark.parametrize("mesh", only(NAMED, {"2", "2x2"}.__contains__))
def test_every_layout_is_read_as_torch_means_it_or_refused_by_name(mesh):
    seen = set()
    for outcome in dtensors.outcomes(NAMED[mesh], dtensors.SHAPES[:2]):
        case = outcome.case
        seen.add(case.family)
        if (word := REFUSED_FAMILIES.get(case.family)) is not None:
            assert outcome.ours == REFUSED, case.what
            assert outcome.message.startswith("trainer rank 0: w ")
            assert word in outcome.message
        else:
            assert outcome.ours == SAME, (case.family, case.what, outcome.torchs, outcome.message)
    assert len(seen) >= (5 if NAMED[mesh] else 1)
