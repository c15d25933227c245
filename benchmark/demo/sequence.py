"""The demo as one would tell it; every trainer rank runs it in step.

For each precision an engine starts on dummy weights. Then, for each update: the trainer takes one optimizer step,
transformers says what the new weights say, the engine is seen to say something else or nothing (it has dummy weights,
or those of the step before), the update runs, and the engine is seen to say the same.
"""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from tokenizers import Tokenizer
from torch.distributed.device_mesh import DeviceMesh

from benchmark.demo import text, tiny_model
from benchmark.demo.events import EventWriter, Tokens, Updated
from benchmark.demo.reference import greedy_tokens
from benchmark.demo.settings import Settings
from benchmark.demo.trainer import Trainer
from sglang_reshard import VerlEngine, WeightSender
from sglang_reshard.errors import WeightsMissing
from sglang_reshard.observability.report import UpdateReport
from sglang_reshard.testing import cpu_host

# Name of the engine's hook that writes digests of its memory; the engine has to be started with it.
DIGEST_HOOK = "tools.oracle.digests.write_live_digests"

ON_GPU = {"mem_fraction_static": 0.3, "max_total_tokens": 2048, "disable_cuda_graph": True}


class Sequence:
    """One trainer, and one engine after another."""

    def __init__(
        self,
        trainer: Trainer,
        tokenizer: Tokenizer,
        cpu_mesh: DeviceMesh,
        events: EventWriter,
        settings: Settings,
    ) -> None:
        self._trainer, self._tokenizer, self._mesh, self._events = trainer, tokenizer, cpu_mesh, events
        self._settings, self._folder, self._target_tp = settings, Path(settings.folder), settings.target_tp
        self._prompts = [encoding.ids for encoding in tokenizer.encode_batch(list(text.PROMPTS))]
        self._steps = 0

    def run(self, dtype: str) -> None:
        with self._events.phase(
            f"start the engine: TP={self._target_tp}, {dtype}, dummy weights", 12 + 5 * self._target_tp
        ):
            engine = self._start_engine(dtype)
        try:
            for transport in self._settings.transports:
                self._step_and_update(engine, dtype, transport)
        finally:
            engine.shutdown()

    def _start_engine(self, dtype: str) -> VerlEngine:
        return VerlEngine(
            device_mesh_cpu=self._mesh,
            tp_size=self._target_tp,
            bucket_bytes=self._settings.bucket_bytes,
            model_path=str(self._folder / "model"),
            load_format="dummy",
            dtype=dtype,
            context_length=tiny_model.CONTEXT_LENGTH,
            custom_weight_loader=[DIGEST_HOOK],
            log_level="warning",
            **(cpu_host.engine_arguments() if self._settings.device == "cpu" else ON_GPU),
        )

    def _step_and_update(self, engine: VerlEngine, dtype: str, transport: str) -> None:
        self._steps += 1
        version = str(self._steps)
        with self._events.phase(f"optimizer step {version}") as notes:
            loss = self._trainer.step(self._tokenizer)
            notes.append(f"loss {loss:.3f}")
        checkpoint = self._folder / f"checkpoint-{version}"
        with self._events.phase(f"reference {version}: the same weights in transformers"):
            self._trainer.save_checkpoint(checkpoint)
            reference, lead = self._refer(checkpoint, dtype)
        # After the step: the trainer's memory must not be the engine's.
        with self._events.phase(f"generate before update {version}"):
            before = self._say_if_served(engine)
        with self._events.phase(f"reshard {version}: TP={self._mesh.size()} -> TP={self._target_tp}") as notes:
            report = self._update(engine, transport, version)
            notes.append(f"{report.transport}, {sum(r.received_bytes for r in report.engine_ranks) / 1e6:.1f} MB")
        with self._events.phase(f"generate after update {version}") as notes:
            after = self._say(engine)
            said = self._tokenizer.decode(after[0])
            notes.append(f"{text.PROMPTS[0]!r} ->{said!r}")
        with self._events.phase(f"digests {version}: hash what every engine rank holds"):
            live = self._live_digests(engine, version)
        self._events.write(
            Updated(
                dtype=dtype,
                checkpoint=str(checkpoint),
                report=report,
                reference=reference,
                before=before,
                after=after,
                lead=lead,
                live=live,
                said=said,
            )
        )

    def _update(self, engine: VerlEngine, transport: str, version: str) -> UpdateReport:
        """By the engine's own sender, which chooses the transport; by one of its own for another transport."""
        named = self._trainer.model.named_parameters()
        if transport == "auto":
            return engine.update_weights_from_tensor(named, weight_version=version)
        send = None if engine.engine is None else engine.engine.update_weights_distributed
        sender = WeightSender.over(
            self._mesh.get_group(), send, transport=transport, bucket_bytes=self._settings.bucket_bytes
        )
        try:
            return sender.update(named, weight_version=version)
        finally:
            sender.close()

    def _say_if_served(self, engine: VerlEngine) -> Tokens:
        """Returns nothing before the first update: the engine started on dummy weights, which it does not serve."""
        try:
            return self._say(engine)
        except WeightsMissing:
            return []

    def _say(self, engine: VerlEngine) -> Tokens:
        outputs = engine.generate(
            input_ids=self._prompts,
            sampling_params={"temperature": 0, "max_new_tokens": text.NEW_TOKENS, "ignore_eos": True},
        )
        return [output["output_ids"] for output in outputs]

    def _refer(self, checkpoint: Path, dtype: str) -> tuple[Tokens, float]:
        """On rank 0 only; the other ranks wait at the next collective."""
        if dist.get_rank() != 0:
            return [], 0.0
        return greedy_tokens(checkpoint, self._prompts, text.NEW_TOKENS, dtype)

    def _live_digests(self, engine: VerlEngine, version: str) -> list[dict[str, str]]:
        if engine.engine is None:
            return []
        from tools.oracle.digests import read_live_digests

        folder = self._folder / f"digests-{version}"
        folder.mkdir()
        return read_live_digests(engine.engine, folder)
