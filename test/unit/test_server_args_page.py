"""docs/server-args.md judges each option once, and says of the code and the tests what is so."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from sglang_reshard.patches.supported_engine import _REFUSED
from support.server_args_page import listed

ROOT = Path(__file__).parents[2]


def test_no_option_is_judged_twice() -> None:
    counts = Counter(name for names in listed().values() for name in names)
    assert [name for name, count in counts.items() if count > 1] == []


def test_those_that_are_refused_are_those_of_the_code() -> None:
    assert set(_REFUSED) <= set(listed()["Refused"])


def test_those_that_tests_run_are_in_tests() -> None:
    folders = [ROOT / name for name in ("test", "python/sglang_reshard/selftest", "python/sglang_reshard/testing")]
    words = {word for folder in folders for file in folder.rglob("*.py") for word in words_of(file.read_text())}
    assert [name for name in listed()["Run by tests"] if name not in words] == []


def words_of(text: str) -> set[str]:
    """With the options of command lines as the arguments that they set."""
    return set(re.findall(r"\w+", text)) | {o.replace("-", "_") for o in re.findall(r"--([\w-]+)", text)}
