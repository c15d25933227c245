"""A draft that proposes only some tokens keeps copies of its target's weights. An update renews them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sglang_reshard.derived import DerivedState, remember_loaded
from sglang_reshard.patches.draft_models import Drafts, TargetAndDrafts, drafts_of
from sglang_reshard.trace.built_modules import remember
from sglang_reshard.trace.repack import repacked_modules
from sglang_reshard.trace.tracer import trace
from tools.oracle.replay import replay
from toy_loader import specs_of

WIDTH, VOCABULARY = 3, 8
TOKENS = torch.tensor([6, 0, 3])


class Model(nn.Module):
    """As SGLang's models are, as far as embeddings and heads go. A draft loads no head of its own."""

    def __init__(self, takes: str = "lm_head.weight") -> None:
        super().__init__()
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.fc = nn.Linear(WIDTH, WIDTH, bias=False)
        self.takes = takes

    def get_embed_and_head(self):
        return None, self.lm_head.weight

    def load_weights(self, weights):
        for name, tensor in weights:
            if name in ("fc.weight", self.takes):
                self.get_parameter(name).data.copy_(tensor)


class Eagle3(Model):
    """Has a head of its own, and the tokens in its checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(WIDTH, len(TOKENS), bias=False)
        self.hot_token_id = torch.zeros_like(TOKENS)

    def load_weights(self, weights):
        for name, tensor in weights:
            if name == "d2t":
                self.hot_token_id = tensor + 0
            else:
                super().load_weights([(name, tensor)])


def weights(head_rows: int = 0) -> dict[str, torch.Tensor]:
    given = {"lm_head.weight": torch.rand(VOCABULARY, WIDTH), "fc.weight": torch.rand(WIDTH, WIDTH)}
    own = {"draft.fc.weight": torch.rand(WIDTH, WIDTH)}
    if head_rows:
        own["draft.lm_head.weight"] = torch.rand(head_rows, WIDTH)
    return given | own


def as_started(target: Model) -> Model:
    """A draft whose head SGLang has replaced."""
    draft = Model(takes="")
    remember(draft.lm_head, lambda _: None, lambda _: False)
    remember_loaded(draft)
    head = target.lm_head.weight.clone()
    head.data = head.data[TOKENS]
    del draft.lm_head.weight
    draft.lm_head.weight = head
    return draft


def test_the_head_is_made_of_the_new_rows_where_it_is():
    target = Model()
    draft = as_started(target)
    head = draft.lm_head.weight
    both = TargetAndDrafts(target, Drafts([draft], TOKENS))
    derived = DerivedState(both)
    signature = derived.signature()
    assert repacked_modules(both) == []
    for _ in range(2):
        given = weights()
        replay(trace(both, specs_of(given)), given, derived)
        assert draft.lm_head.weight is head
        assert torch.equal(head, given["lm_head.weight"][TOKENS])
        assert torch.equal(draft.fc.weight, given["draft.fc.weight"])
        assert derived.signature() == signature
    assert derived.remark == ""


def test_a_draft_follows_whose_head_is_a_part_of_the_targets():
    """As Gemma's is with tensor parallelism: the target keeps whole vocabularies, and its draft does not."""
    target = Model()
    draft = as_started(target)
    draft.lm_head.weight = target.lm_head.weight[2:5]
    both = TargetAndDrafts(target, Drafts([draft]))
    derived = DerivedState(both)
    derived.signature()
    given = weights()
    replay(trace(both, specs_of(given)), given, derived)
    assert torch.equal(draft.lm_head.weight, given["lm_head.weight"][2:5])
    assert torch.equal(target.lm_head.weight, given["lm_head.weight"])
    assert derived.remark == ""


def test_the_workers_copy_of_an_eagle_3_s_tokens_follows_and_its_head_is_its_own():
    target, draft, copy = Model(), Eagle3(), torch.zeros_like(TOKENS)
    both = TargetAndDrafts(target, Drafts([draft], copy))
    given = weights(len(TOKENS)) | {"draft.d2t": TOKENS}
    replay(trace(both, specs_of(given)), given)
    assert torch.equal(copy, TOKENS)
    assert torch.equal(draft.lm_head.weight, given["draft.lm_head.weight"])


@pytest.mark.parametrize("of_worker", [lambda w: w, lambda w: SimpleNamespace(draft_worker=w)], ids=["tp", "own"])
def test_workers_of_both_generations_say_which_tokens(of_worker):
    runner = SimpleNamespace(model=Model(), draft_model_idx=2)
    worker = of_worker(SimpleNamespace(model_runner=runner, hot_token_id=TOKENS))
    algorithm = SimpleNamespace(is_ngram=lambda: False)
    found = drafts_of(SimpleNamespace(draft_worker=worker, spec_algorithm=algorithm))
    assert (found.models, found.layers) == ([runner.model], [2])
    assert found.hot_tokens is TOKENS
