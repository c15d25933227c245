"""A reward for untrained models: verl loads it by path."""

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """The share of letters in the answer: any two answers of a random model differ in it."""
    return sum(c.isalpha() for c in solution_str) / max(1, len(solution_str))
