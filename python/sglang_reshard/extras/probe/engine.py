"""Asks an engine for its log-probabilities of a probe's sequences, by its own prefill."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as NotInTime
from dataclasses import dataclass
from typing import Any, TypeVar

from sglang_reshard import tasks
from sglang_reshard.errors import ReshardError, Unsupported
from sglang_reshard.protocol.weights_info import WeightsInfo

T = TypeVar("T")
# One token is sampled, which nobody reads. Log-probabilities of a prompt are those of the model's own logits; of
# these parameters they depend on none.
_SAMPLING = {"max_new_tokens": 1, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "ignore_eos": True}


class NotProbed(ReshardError):
    """Nothing could be compared; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The update whose weights an engine has to answer with.

    session, update  the session's name, and the number of the update in it
    weight_version   that it has set; None if it has set none
    lora             name of the adapter that it brought; None for the model's own weights
    """

    session: str
    update: int
    weight_version: str | None
    lora: str | None = None


class ProbedEngine:
    """One engine as a probe asks it: `generate`, and if there is one `weights_info`, see `Probe.engine`."""

    def __init__(self, given: Any) -> None:
        """Raises Unsupported for an object that cannot be asked."""
        self._info: Callable[[], WeightsInfo] | None = getattr(given, "weights_info", None)
        self._record: Callable[[Any], object] | None = getattr(given, "record_probe", None)
        self._generate: Callable[..., Any] = getattr(given, "generate", given)
        if not callable(self._generate):
            raise Unsupported(
                "the probe cannot ask this engine: its `send` is not a method of an engine, of a server's client or "
                "of sglang.Engine. On trainer rank 0, pass Probe(engine=...) with an object that has `generate`, or a "
                "function"
            )

    def logprobs(
        self, sequences: list[list[int]], expected: Expected, timeout_s: float
    ) -> tuple[tuple[tuple[float, ...], ...], ...]:
        """Returns log-probabilities by data parallel rank and sequence, of all tokens but the first.

        Raises NotProbed if the engine does not answer within `timeout_s`, or not with these weights.
        """
        return _within(timeout_s, lambda: self._ask(sequences, expected))

    def record(self, summary: Any, timeout_s: float) -> None:
        """Adds the outcome to the engine's metrics, if it has any. Raises NotProbed if that fails."""
        record = self._record
        if record is not None:
            _within(timeout_s, lambda: record(summary))

    def _ask(self, sequences: list[list[int]], expected: Expected) -> tuple[tuple[tuple[float, ...], ...], ...]:
        before = self._live(expected)
        ranks = before.data_parallel_ranks if before is not None else 1
        arguments: dict[str, Any] = {"return_logprob": True, "logprob_start_len": 0, "sampling_params": _SAMPLING}
        if expected.lora is not None:
            arguments["lora_path"] = expected.lora
        found = []
        for rank in range(ranks):
            to_rank = {"routed_dp_rank": rank} if ranks > 1 else {}
            outputs = self._generate(input_ids=sequences, **arguments, **to_rank)
            outputs = outputs if isinstance(outputs, list) else [outputs]
            if len(outputs) != len(sequences):
                raise NotProbed(f"the engine returned {len(outputs)} answers for {len(sequences)} sequences")
            answers = enumerate(zip(outputs, sequences, strict=True))
            found.append(tuple(_of_answer(n, output["meta_info"], tokens, expected) for n, (output, tokens) in answers))
        if self._live(expected) != before:
            raise NotProbed("other weights were written while the probe was running")
        return tuple(found)

    def _live(self, expected: Expected) -> WeightsInfo | None:
        """Describes the engine's weights, if it can. Raises NotProbed unless it serves those of the update."""
        if self._info is None:
            return None
        info = self._info()
        if info.paused:
            raise NotProbed(
                "generation is paused, so the engine would not answer; call continue_generation before the update ends"
            )
        if info.torn or info.under_way:
            raise NotProbed("another update has begun" if info.under_way else f"the weights are torn: {info.torn}")
        if expected.lora is None and (info.session, info.update) != (expected.session, expected.update):
            raise NotProbed(
                "the live weights are no longer those of this update: other weights were written, or these were "
                "released"
            )
        return info


def _of_answer(number: int, meta: dict[str, Any], tokens: Sequence[int], expected: Expected) -> tuple[float, ...]:
    """Returns the log-probabilities of one sequence. Those of NaN arrive as None from a server: JSON has no NaN."""
    finished = meta.get("finish_reason") or {}
    if finished.get("type") == "abort":
        raise NotProbed(f"the engine aborted sequence {number}: {finished.get('message', '')}")
    version = meta.get("weight_version", expected.weight_version)
    if expected.weight_version is not None and version != expected.weight_version:
        raise NotProbed(f"the engine answered with version {version!r}, not {expected.weight_version!r}")
    if cached := meta.get("cached_tokens", 0):
        raise NotProbed(f"the engine took {cached} tokens of sequence {number} from its prefix cache")
    found = meta.get("input_token_logprobs") or []
    if len(found) != len(tokens):
        raise NotProbed(
            f"the engine returned log-probabilities for {len(found)} of {len(tokens)} tokens of sequence {number}; is "
            "it longer than the engine's context?"
        )
    return tuple(float("nan") if logprob is None else float(logprob) for logprob, *_ in found[1:])


def _within(timeout_s: float, call: Callable[[], T]) -> T:
    """Returns what `call` returns in a thread, which is left behind if it takes longer. Any failure is NotProbed."""
    found = tasks.start("probe", call)
    try:
        return found.result(timeout_s)
    except NotProbed:
        raise
    except NotInTime:
        if found.done():  # the engine's own timeout
            raise NotProbed(f"the engine failed: {found.exception()}") from None
        raise NotProbed(f"the engine did not answer within {timeout_s:g} s; is generation paused?") from None
    except Exception as error:
        raise NotProbed(f"the probe's request to the engine failed: {type(error).__name__}: {error}") from error
