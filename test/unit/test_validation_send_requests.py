"""Requests of engine ranks that a trainer rank must not carry out are refused, naming what is wrong with them."""

import numpy as np
import pytest
from msgspec.structs import replace

from sglang_reshard.errors import Mismatch
from sglang_reshard.layout.regions import Box, LocalRegion
from sglang_reshard.plan import RankLocation, TensorIndex, plan_reads
from sglang_reshard.routes.p2p.ask import check_send_request
from sglang_reshard.routes.p2p.messages import SendRequest, send_request
from support.plans import wanted
from support.stated import BIG, GOOD, rows, stated


@pytest.fixture(scope="module")
def good():
    """A request for all three tensors, in this order."""
    boxes = Box((0, 0), (2, 3)), Box((1, 1), (2, 3)), Box((0,), (5,))
    copies = [wanted(GOOD, number, box, 10 * number) for number, box in enumerate(boxes)]
    taken = plan_reads(TensorIndex.of(GOOD), copies, RankLocation(0, 1, "a", ("a", "b")))
    found = send_request(taken, 0)
    check_send_request(found, GOOD, 0, 3)
    return found


def numbers(*values):
    return np.array(values, "<i4").tobytes()


def at(region):
    return lambda r: replace(r, regions=(region, *r.regions[1:]))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda r: replace(r, tensor_ids=r.tensor_ids[:-1]), "columns have"),
        (lambda r: replace(r, tensor_ids=r.tensor_ids[:-4]), "columns have"),
        (
            lambda r: replace(r, tensor_ids=numbers(0, 1, 3), region_ids=numbers(0, 1, 2)),
            "0 to 3 are out of range for 3 tensors",
        ),
        (
            lambda r: replace(r, tensor_ids=numbers(0, -1), region_ids=numbers(0, 0)),
            "-1 to 0 are out of range for 3 tensors",
        ),
        (lambda r: replace(r, region_ids=numbers(0, 1, 99)), "for 3 regions"),
        (lambda r: replace(r, tensor_ids=numbers(2, 1, 0)), "exceeds its shard of"),
        (at(LocalRegion((1, 0), (2, 3), (1, 1))), r"exceeds its shard of t0, which has shape \(2, 3\)"),
        (at(LocalRegion((BIG, BIG), (BIG, BIG), (BIG, BIG))), "exceeds its shard of t0"),
        (lambda r: replace(r, dtypes=("bfloat16",), dtype_ids=b"\0\0"), "its dtypes .* do not match"),
        (lambda r: replace(r, dtypes=("bfloat16",), dtype_ids=b"\0\1\0"), "its dtypes .* do not match"),
        (lambda r: replace(r, dtypes=("bfloat17",), dtype_ids=b"\0\0\0"), "its dtypes .* do not match"),
        (
            lambda r: replace(r, tensor_ids=r.tensor_ids * 60, region_ids=r.region_ids * 60),
            "requests .* elements, more than .* times the",
        ),
    ],
)
def test_a_request_for_other_elements_than_there_are_is_refused(good, change, says):
    with pytest.raises(Mismatch, match=f"invalid send request of engine rank 3 for trainer rank 0: .*{says}"):
        check_send_request(change(good), GOOD, 0, 3)


def test_a_trainer_rank_that_holds_nothing_of_a_tensor_is_not_asked_for_it():
    layout = stated(rows((0, 4, (1,), 0)))
    asked = SendRequest((LocalRegion((0, 0), (1, 1), (1, 1)),), numbers(0), numbers(0))
    check_send_request(asked, layout, 1, 0)
    with pytest.raises(Mismatch, match=r"w, which has shape \(0,\)"):
        check_send_request(asked, layout, 0, 0)
