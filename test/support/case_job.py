"""What scripts do that examine cases on the ranks of one world; `support.scripts.answers` runs them."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Sequence
from typing import Any

from support.scripts import answer
from support.world import Trainer, run_world


def answer_cases(
    ranks: int, examine: Callable[..., Any], cases: Sequence[Any], *arguments: Any, deadline_s: float
) -> None:
    """Answers, as JSON, a line for each case: what `examine(trainer, case, *arguments)` has returned on each rank.

    Ranks are forked, so that what takes long to import is imported once.
    """
    context = multiprocessing.get_context("fork")
    found, _ = run_world(ranks, 0, _all, None, examine, cases, arguments, deadline_s=deadline_s, context=context)
    for of_ranks in zip(*found, strict=True):
        answer(json.dumps(of_ranks))


def _all(trainer: Trainer, examine: Callable[..., Any], cases: Sequence[Any], arguments: tuple[Any, ...]) -> list[Any]:
    return [examine(trainer, case, *arguments) for case in cases]
