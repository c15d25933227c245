"""Measures how far rollout and actor are apart in verl, as a probe does, by the version of the rollout's weights.

verl compares the probabilities of sampled tokens itself, where the rollout returns them
(`rollout.calculate_log_probs=True`): `training/rollout_probs_diff_mean`. From the same tensors this module takes
differences of log-probabilities, in nats, as `sglang_reshard.extras.probe` has them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch

from sglang_reshard.extras.probe.probing import differences
from sglang_reshard.verl.hooks import around

_FUNCTION = "calculate_debug_metrics"
_TRAINER = "verl.trainer.ppo.v1.trainer_base"
# Of the samples of the batch that verl's v1 trainer works on; its older trainers have them in the batch.
_tags: ContextVar[Sequence[Any]] = ContextVar("sglang_reshard_tags", default=())


def install() -> None:
    """Hooks verl's comparison, in the modules of this process that have it."""
    from verl.utils.debug import metrics

    around(metrics, _FUNCTION, _calculate)
    trainer = sys.modules.get(_TRAINER)  # it has imported the function by name; too much for a worker to import
    if trainer is not None:
        around(trainer, _FUNCTION, _calculate)
        around(trainer.PPOTrainer, "_compute_old_log_prob", _compute_old_log_prob)


def difference_metrics(
    rollout: torch.Tensor, actor: torch.Tensor, mask: torch.Tensor, versions: Sequence[tuple[int, int] | None]
) -> dict[str, float]:
    """Returns metrics of one batch. All tensors have the shape [samples, tokens].

    rollout, actor  log-probabilities of the tokens by the engine that sampled them, and by the training engine
    mask            nonzero for tokens that the engine has sampled
    versions        the first and the last version (verl's `global_steps`) of each sample's weights; None if unknown

    reshard/logprob_diff_mean, reshard/logprob_diff_max   over samples of one version, the newest in the batch; over
                                                          all samples if no version is known
    reshard/logprob_diff_max_version                      that version
    reshard/logprob_diff_mean_older                       over all other samples, which older weights have sampled, if
                                                          only in part
    """
    known = [version for version in versions if version is not None]
    newest = max((last for _, last in known), default=None)
    of_newest = torch.tensor([newest is None or version == (newest, newest) for version in versions])
    found: dict[str, float] = {}
    for rows, name in ((of_newest, ""), (~of_newest, "_older")):
        chosen = mask.bool() & rows[:, None].to(mask.device)
        if not chosen.any():
            continue
        apart = differences(rollout[chosen], actor[chosen])
        found[f"reshard/logprob_diff_mean{name}"] = apart.mean
        if not name:
            found["reshard/logprob_diff_max"] = apart.largest
            found |= {} if newest is None else {"reshard/logprob_diff_max_version": float(newest)}
    return found


def _calculate(stock: Callable[..., dict[str, Any]], data: Any) -> dict[str, Any]:
    metrics = stock(data)
    if not metrics.get("training/rollout_probs_diff_valid"):
        return metrics
    batch = data.batch
    rollout, actor = batch["rollout_log_probs"], batch["old_log_probs"]
    mask = batch["response_mask"] if "response_mask" in batch else batch["attention_mask"][:, -rollout.shape[1] :]
    return {**metrics, **difference_metrics(rollout, actor.to(rollout.device), mask, _versions(data, len(rollout)))}


def _versions(data: Any, samples: int) -> list[tuple[int, int] | None]:
    """Returns the versions of each sample, from the batch or from the tags of the batch that is worked on."""
    names = "min_global_steps", "max_global_steps"
    columns = [data.non_tensor_batch.get(name) for name in names]
    rows = [tuple(tag.get(name) for name in names) for tag in _tags.get()]
    if columns[0] is not None and columns[1] is not None:
        rows = list(zip(*columns, strict=True))
    if len(rows) != samples:
        return [None] * samples
    return [None if first is None or last is None else (int(first), int(last)) for first, last in rows]


def _compute_old_log_prob(stock: Callable[..., Any], trainer: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    token = _tags.set(batch.tags or ())
    try:
        return stock(trainer, batch, *args, **kwargs)
    finally:
        _tags.reset(token)
