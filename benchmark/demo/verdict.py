"""What counts as proof. Pure functions over what the demo saw, so that a test can feed them anything."""

from __future__ import annotations

from typing import Any

import msgspec

from benchmark.demo.events import Updated
from benchmark.demo.settings import Settings

# dtype -> checkpoint -> per engine rank, tensor name -> digest
Expected = dict[str, dict[str, list[dict[str, str]]]]

# What a rank may hold beyond its two buckets: the allocator's noise and Python's.
SLACK_BYTES = 8 * 1024 * 1024


class UpdateVerdict(msgspec.Struct, frozen=True):
    """One update, judged.

    tokens_equal   after it the engine says what transformers says with the trainer's weights
    told_apart     before it the engine said something else, or refused the request, so the comparison can fail
    unmoved        before it the engine still said what it said after the last update of the same engine,
                   although the trainer had taken a step since; None for an engine's first update
    differing      "rank N: name" of each tensor that is not bit for bit what a stock load puts there
    """

    tokens_equal: bool
    told_apart: bool
    unmoved: bool | None
    tensors: int
    differing: list[str]


class Verdict(msgspec.Struct, frozen=True):
    """claim -> whether it holds, and the updates one by one."""

    claims: dict[str, bool]
    updates: list[UpdateVerdict]

    @property
    def ok(self) -> bool:
        return all(self.claims.values())


def differing_tensors(live: list[dict[str, str]], stock: list[dict[str, str]]) -> list[str]:
    """Every tensor of every rank that the two do not agree on, missing ones included."""
    if len(live) != len(stock):
        return [f"{len(live)} ranks are live and {len(stock)} were expected"]
    return [
        f"rank {rank}: {name}"
        for rank, (here, there) in enumerate(zip(live, stock, strict=True))
        for name in sorted(here.keys() | there.keys())
        if here.get(name) != there.get(name)
    ]


def judge(settings: Settings, updates: list[Updated], expected: Expected) -> Verdict:
    """Hold what was seen against what should be. With no updates nothing is proved."""
    verdicts = []
    previous: Updated | None = None
    for update in updates:
        same_engine = previous is not None and previous.dtype == update.dtype
        verdicts.append(
            UpdateVerdict(
                tokens_equal=update.after == update.reference,
                told_apart=update.before != update.reference,
                unmoved=update.before == previous.after if previous is not None and same_engine else None,
                tensors=sum(map(len, update.live)),
                differing=differing_tensors(update.live, expected.get(update.dtype, {}).get(update.checkpoint, [])),
            )
        )
        previous = update
    # Sixteen ranks round bfloat16 sums in another order than one, which may decide a tie: tokens have to
    # be equal in float32 and are reported in bfloat16. Bits have to be equal in both.
    exact = [v for v, u in zip(verdicts, updates, strict=True) if u.dtype == "float32"] or verdicts
    required = any(u.dtype == "float32" for u in updates)
    bound = 2 * settings.bucket_bytes + SLACK_BYTES
    ranks = [(u.report, rank) for u in updates for rank in u.report.engine_ranks]
    claims = {
        "updated": bool(updates) and all(u.report.success for u in updates),
        "bit_exact": bool(updates) and all(v.tensors and not v.differing for v in verdicts),
        "told_apart": all(v.told_apart for v in exact),
        "unmoved": all(v.unmoved is not False for v in verdicts),
        "memory_bounded": bool(ranks) and all(rank.peak_extra_bytes <= bound for _, rank in ranks),
    }
    if required:
        claims["tokens_equal"] = all(v.tokens_equal for v in exact)
    if settings.target_tp > settings.source_tp and settings.target_tp % settings.source_tp == 0:
        # What engine rank 0 needs lies in trainer rank 0's shard then. (Ranks at a shard's edge may need
        # two: the engine pads its vocabulary before it cuts, the trainer does not.)
        claims["rank_0_own_shard"] = all(
            report.engine_ranks[0].received_bytes <= report.trainer_ranks[0].shard_bytes
            for report in (u.report for u in updates)
        )
    return Verdict(claims, verdicts)


def summary(settings: Settings, updates: list[Updated], verdict: Verdict, seconds: dict[str, float]) -> dict[str, Any]:
    """The line of JSON that ends the demo."""
    exact = [v for v, u in zip(verdict.updates, updates, strict=True) if u.dtype == "float32"]
    ranks = [rank for u in updates for rank in u.report.engine_ranks]
    return {
        "ok": verdict.ok,
        "source_tp": settings.source_tp,
        "target_tp": settings.target_tp,
        "device": settings.device,
        "tokens_equal": bool(updates) and all(v.tokens_equal for v in exact or verdict.updates),
        "bit_exact": verdict.claims["bit_exact"],
        "claims": verdict.claims,
        "transport": ", ".join(sorted({u.report.transport for u in updates})),
        "bucket_bytes": settings.bucket_bytes,
        "peak_extra_bytes": max((rank.peak_extra_bytes for rank in ranks), default=0),
        "received_bytes_rank_0": max((rank.received_bytes for rank in ranks if rank.rank == 0), default=0),
        "shard_bytes_trainer_rank_0": max(
            (t.shard_bytes for u in updates for t in u.report.trainer_ranks if t.rank == 0), default=0
        ),
        "updates": [
            {
                "dtype": update.dtype,
                "weight_version": update.report.weight_version,
                "transport": update.report.transport,
                "transport_reason": update.report.transport_reason,
                "tokens_equal": judged.tokens_equal,
                "tokens_equal_before": not judged.told_apart,
                "engine_unmoved_by_the_step": judged.unmoved,
                "smallest_logit_lead": update.lead,
                "bit_exact": bool(judged.tensors) and not judged.differing,
                "tensors_compared": judged.tensors,
                "tensors_differing": judged.differing[:10],
                "seconds": rounded(update.report.seconds),
                "engine_ranks": [
                    {
                        "rank": rank.rank,
                        "received_bytes": rank.received_bytes,
                        "least_bytes": rank.least_bytes,
                        "peak_extra_bytes": rank.peak_extra_bytes,
                        "seconds": rounded(rank.seconds),
                    }
                    for rank in update.report.engine_ranks
                ],
                "trainer_ranks": msgspec.to_builtins(update.report.trainer_ranks),
            }
            for update, judged in zip(updates, verdict.updates, strict=True)
        ],
        "seconds": rounded(seconds),
    }


def rounded(seconds: dict[str, float]) -> dict[str, float]:
    return {phase: round(value, 4) for phase, value in seconds.items()}
