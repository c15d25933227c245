"""One run of the self-test, as the launcher gives it to the trainer ranks."""

from __future__ import annotations

import msgspec

from sglang_reshard.cli.layouts import Source, Target


class Run(msgspec.Struct, frozen=True):
    """From one trainer into one engine, with the steps that are taken.

    name          for people
    model         see `models.save`
    dtype         of the engine
    trainer_gpus  of the trainer ranks, in turns; none on a host without GPUs
    engine_gpus   one of each engine rank; the same ones if both share them
    parts         names of `steps.PARTS`, in order
    routes        transports to time
    usual_s       about how many seconds it takes
    engine        more arguments of the engine, on GPUs
    """

    name: str
    source: Source
    target: Target
    model: str
    dtype: str = "bfloat16"
    trainer_gpus: tuple[int, ...] = ()
    engine_gpus: tuple[int, ...] = ()
    parts: tuple[str, ...] = ()
    routes: tuple[str, ...] = ("auto",)
    usual_s: float = 0.0
    engine: dict[str, float | int | bool | str] = {}

    @property
    def device(self) -> str:
        return "cuda" if self.engine_gpus else "cpu"

    @property
    def colocated(self) -> bool:
        return set(self.trainer_gpus) == set(self.engine_gpus)


class Job(msgspec.Struct, frozen=True):
    """folder: for the model and checkpoints. events: the file to report to. ends_at: `time.time()` after which no part
    of the run begins.
    """

    run: Run
    folder: str
    events: str
    ends_at: float
