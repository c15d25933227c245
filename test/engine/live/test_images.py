"""A live vision-language model: what it says of an image is what transformers says with the new weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.trainers import run_trainers
from tools.oracle.stock import stock_digests

pytestmark = [pytest.mark.engine]


def test_an_image_is_seen_with_the_new_weights(tmp_path: Path) -> None:
    from support.tiny_qwen3_vl import write_image, write_qwen3_vl

    checkpoints = [str(write_qwen3_vl(tmp_path / version, int(version))) for version in ("1", "2")]
    image, engine = write_image(tmp_path / "image.png"), {"tp_size": 2, "dtype": "float32"}
    seen = run_trainers(2, "images_job:two_updates", tmp_path, engine=engine, image=str(image))[0]
    before, first, again, second, once_more = seen["tokens"]
    assert [first, second] == seen["reference"]
    assert (again, once_more) == (first, second), "from its cache"
    assert len({tuple(said) for said in (before, first, second)}) == 3
    expected = stock_digests(checkpoints[0], checkpoints, **engine, ranks=range(2))
    for live, stock in zip(seen["digests"], expected, strict=True):
        assert live == [stock[rank] for rank in range(2)]
