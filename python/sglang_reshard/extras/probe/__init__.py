"""Compares the log-probabilities of an engine after an update with those of the trainer: log-probabilities of a few
tokens.

    probe = Probe([[1, 2, 3, 4], [5, 6, 7]], logprobs=model)     # on every trainer rank
    report = sender.update(model, weight_version="7", probe=probe)
    report.probe.mean_difference, report.probe.largest_difference, report.probe.seconds

`verify` compares weights; a probe compares the function that the engine computes with them. It also finds what no
update writes: a copy of a weight that the model's first forward made, a scale that was folded in once.

probe.py       Probe: what a user asks for
trainer.py     the trainer's log-probabilities, of a module, a function or tensors
engine.py      the engine's, by its own prefill
probing.py     Probing: one update's probe, on all trainer ranks; the differences
"""

from __future__ import annotations

from sglang_reshard.extras.probe.probe import Probe
from sglang_reshard.extras.probe.trainer import module_logprobs

__all__ = ["Probe", "module_logprobs"]
