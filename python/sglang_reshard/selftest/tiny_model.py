"""A Qwen3 small enough for a laptop, with shapes that suit the sizes asked for, and its own tokenizer.

Nothing comes from a hub: the weights are random and the tokenizer is trained on `text.CORPUS`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_reshard.selftest import text

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import Qwen3Config

LAYERS = 4
HIDDEN = 512
HEAD_DIM = 32
LEAST_KV_HEADS, QUERIES_PER_KV_HEAD, LEAST_INTERMEDIATE = 8, 2, 2048
# A prime: no trainer size divides it, so the embedding's and the head's shards are uneven, and the
# engine pads its vocabulary.
VOCABULARY = 4099
# What the engine serves, well below what the model could: SGLang lengthens the rotary cache when the two
# are close, after loading, and then the cache would not be what loading alone makes of it.
CONTEXT_LENGTH, MAX_POSITIONS = 256, 4096


def head_counts(source_tp: int, target_tp: int) -> tuple[int, int]:
    """(attention heads, key and value heads): whole heads of both for every rank of both sides.

    An engine can also have more ranks than key and value heads. On a GPU several ranks then repeat one;
    on a CPU SGLang pads the heads instead, and ranks that hold nothing but padding show little.
    """
    kv_heads = _multiple(math.lcm(source_tp, target_tp), LEAST_KV_HEADS)
    return QUERIES_PER_KV_HEAD * kv_heads, kv_heads


def config(source_tp: int, target_tp: int) -> Qwen3Config:
    from transformers import Qwen3Config

    heads, kv_heads = head_counts(source_tp, target_tp)
    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        dtype="float32",
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        # The engine shards it evenly; the trainer need not.
        intermediate_size=_multiple(target_tp, LEAST_INTERMEDIATE),
        num_hidden_layers=LAYERS,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        # More than the usual 0.02, so that logits lie apart and an untrained model says many things.
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=0,
    )


def save(folder: Path, source_tp: int, target_tp: int) -> None:
    """Writes the configuration and the tokenizer. No weights: the engine starts on dummies."""
    folder.mkdir(parents=True, exist_ok=True)
    config(source_tp, target_tp).save_pretrained(folder)
    tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"})
    )


def tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer; the corpus is too small to fill the vocabulary, so the rest is numbered."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(
        text.CORPUS,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=["<end>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    made.add_tokens([f"<{i}>" for i in range(made.get_vocab_size(), VOCABULARY)])
    return made


def _multiple(of: int, at_least: int) -> int:
    return -(-at_least // of) * of
