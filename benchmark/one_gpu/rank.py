"""A trainer rank of one case: `torchrun -m benchmark.one_gpu.rank JOB`, with the JSON of `Job`."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from benchmark import exactness, gather, stock, timing
from benchmark.paths import ReshardPath
from benchmark.trainer import Job, engine_and_weights, join
from benchmark.weights import FINAL_VERSION, Weights
from sglang_reshard.errors import ReshardError
from tools.oracle.digests import LOADER, Digests, differing

PROMPTS = [[5, 6, 7, 8], [100, 200], [300, 17, 44, 9, 2]]
NEW_TOKENS = 16
UPDATES, STOCK_UPDATES = 10, 3


ON_GPU = {
    "enable_memory_saver": True,
    "mem_fraction_static": 0.4,
    "max_total_tokens": 4096,
    "disable_cuda_graph": False,
    "cuda_graph_max_bs": 4,
    "attention_backend": "triton",  # needs the fewest compiled kernels
    "sampling_backend": "pytorch",
}


class Steps:
    """Runs the steps of a case, and collects a row for each; `engine` is None on all trainer ranks but the first."""

    def __init__(self, job: Job, engine: Any, weights: Weights, device: torch.device) -> None:
        self.case, self.folder = job.case, Path(job.folder)
        self.engine, self.weights, self.device = engine, weights, device
        self.model_path, self.rows = self.folder / "model", list[dict[str, Any]]()
        self.path = ReshardPath(engine, "auto")

    def saw(self, step: str, right: bool = True, **figures: Any) -> None:
        if dist.get_rank() == 0:
            self.rows.append({"case": self.case.kind, "step": step, "right": right, **figures})
            (self.folder / "seen.json").write_bytes(msgspec.json.encode(self.rows))  # should a later step not end

    def run(self) -> None:
        first, _ = self._update(1)
        self.saw("first update", seconds=first, bytes=self.case.model.bytes, tensors=self.case.model.tensors)
        self._warm_updates()
        self._verified_updates()
        ours, said = exactness.live(self.engine, self.folder / "digests"), self._said()
        self._update(UPDATES)  # a load that does nothing would be noticed
        loaded = exactness.stock_load(self.weights, self.engine, self.model_path, self.folder / "digests")
        after_load = self._said()
        different = differing(ours, loaded)
        self.saw("compared with a stock load from disk", ours == loaded and said == after_load, tensors=_count(ours),
                 different=different[:5], log_probabilities_equal=said == after_load)  # fmt: skip
        whole = self._whole()
        self._stock_updates(whole)
        self._memory_saver(loaded, said)
        self._transformers(whole, said)

    def _update(self, version: int, path: ReshardPath | None = None) -> tuple[float, Any]:
        """Returns the seconds of the slowest trainer rank, and the report."""
        self.weights.become(version)
        took, _, report = timing.one_update(path or self.path, self.weights, self.device)
        return took, report

    def _warm_updates(self) -> None:
        seen = [self._update(version) for version in [*range(2, UPDATES + 1), FINAL_VERSION]][1:]
        last = seen[-1][1]
        rank = last.engine_ranks[0]
        self.saw("warm update", seconds=statistics.median(took for took, _ in seen), transport=str(last.transport),
                 reason=last.transport_reason, phases=last.seconds, received_bytes=rank.received_bytes,
                 peak_extra_bytes=rank.peak_extra_bytes)  # fmt: skip

    def _verified_updates(self) -> None:
        for verify in ("sample", "full"):
            path = ReshardPath(self.engine, "auto", verify=verify)
            seen = [self._update(version, path) for version in [*range(2, UPDATES), FINAL_VERSION]]
            self.saw(f"warm update with checksums, verify={verify!r}", bool(seen[-1][1].verified),
                     seconds=statistics.median(took for took, _ in seen[1:]), first_seconds=seen[0][0],
                     phases=seen[-1][1].seconds)  # fmt: skip
            path.close()

    def _said(self) -> list[Any]:
        """What the engine generates greedily: for each prompt its tokens and their log-probabilities."""
        said: list[Any] = [None]
        if self.engine is not None:
            self.engine.flush_cache()
            outputs = [
                self.engine.generate(
                    input_ids=prompt,
                    sampling_params={"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
                    return_logprob=True,
                )
                for prompt in PROMPTS
            ]
            said = [[(t, p) for p, t, *_ in output["meta_info"]["output_token_logprobs"]] for output in outputs]
        dist.barrier()
        return said

    def _whole(self) -> dict[str, torch.Tensor]:
        """Gathers the model on trainer rank 0."""
        gathered = ((name, gather.whole(tensor)) for name, tensor in self.weights.named())
        return {name: tensor.to(self.device) for name, tensor in gathered if self.engine is not None}

    def _stock_updates(self, whole: dict[str, torch.Tensor]) -> None:
        """SGLang's own update, of tensors that are whole already: gathering them is not timed."""
        seconds = []
        for _ in range(STOCK_UPDATES + 1):
            call = lambda: self.engine.update_weights_from_tensor(list(whole.items()))  # noqa: E731
            seconds.append(timing.timed(call if self.engine is not None else lambda: None, self.device)[0])
        self.saw("stock update of whole tensors", seconds=statistics.median(seconds[1:]), first_seconds=seconds[0])

    def _memory_saver(self, loaded: Digests, said: list[Any]) -> None:
        """Releases the weights: an update is refused, and one after the release ends brings all of them."""
        self._on_engine(lambda: self.engine.release_memory_occupation(["weights"]))
        refusal = ""
        try:
            self._update(3)
        except ReshardError as error:
            refusal = f"{type(error).__name__}: {error}"
        self._on_engine(lambda: self.engine.resume_memory_occupation(["weights"]))
        seconds, _ = self._update(FINAL_VERSION)
        found = exactness.live(self.engine, self.folder / "digests")
        again = self._said()
        self.saw("update after the weights were released", bool(refusal) and found == loaded and again == said,
                 seconds=seconds, refused=refusal, different=differing(found, loaded)[:5],
                 log_probabilities_equal=again == said)  # fmt: skip

    def _on_engine(self, call: Callable[[], Any]) -> None:
        if self.engine is not None:
            call()
        dist.barrier()

    def _transformers(self, whole: dict[str, torch.Tensor], said: list[Any]) -> None:
        """Compares log-probabilities of the tokens that the engine chose with those of transformers, in float32."""
        if self.engine is not None:
            from transformers import AutoConfig, AutoModelForCausalLM

            with torch.device(self.device):
                model = AutoModelForCausalLM.from_config(
                    AutoConfig.from_pretrained(self.model_path), dtype=torch.float32
                )
            state = model.state_dict()
            for name, tensor in whole.items():
                _fill(state, name, tensor)
            differences, same = [], 0
            for prompt, of in zip(PROMPTS, said, strict=True):
                tokens = torch.tensor([prompt + [t for t, _ in of]], device=self.device)
                with torch.no_grad():
                    rows = model(tokens).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
                same += sum(int(row.argmax()) == t for row, (t, _) in zip(rows, of, strict=True))
                differences += [abs(float(row[t]) - p) for row, (t, p) in zip(rows, of, strict=True)]
            self.saw("compared with transformers", max(differences) < 0.5 and same >= len(differences) * 0.75,
                     largest_difference=max(differences), same_tokens=same, tokens=len(differences))  # fmt: skip
        dist.barrier()


def _count(digests: Digests) -> int:
    return sum(map(len, digests))


def _fill(state: dict[str, torch.Tensor], name: str, tensor: torch.Tensor) -> None:
    """transformers 5 stacks the experts of a layer: gate and up in one tensor, down in another."""
    if name in state:
        state[name].copy_(tensor)
        return
    layer, _, rest = name.partition(".experts.")
    expert, kind, _ = rest.split(".")
    stacked = state[f"{layer}.experts.{'down_proj' if kind == 'down_proj' else 'gate_up_proj'}"][int(expert)]
    rows = tensor.shape[0]
    {"gate_proj": stacked[:rows], "up_proj": stacked[-rows:], "down_proj": stacked}[kind].copy_(tensor)


def main(job: Job) -> None:
    device = join(job.device, job.case.trainers)
    stock.prepare()
    begin = time.perf_counter()
    with engine_and_weights(job, LOADER, **ON_GPU) as (engine, weights):
        steps = Steps(job, engine, weights, device)
        steps.saw("start", seconds=time.perf_counter() - begin)
        steps.run()
        steps.path.close()


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Job))
