"""A Qwen3-VL of two layers, with a processor of its own, that stock SGLang serves on a CPU host."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

PATCH = 16
END, START_OF_IMAGE, END_OF_IMAGE, IMAGE, VIDEO = (
    "<|endoftext|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
)  # fmt: skip
PROMPT = f"a{START_OF_IMAGE}{IMAGE}{END_OF_IMAGE}what"


def write_qwen3_vl(folder: Path, seed: int, dtype: torch.dtype = torch.float32) -> Path:
    """A checkpoint with a tokenizer of single bytes."""
    tokenizer = _tokenizer()
    processor = Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(patch_size=PATCH, min_pixels=4 * PATCH**2, max_pixels=64 * PATCH**2),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(),
        chat_template="{% for message in messages %}{{ message.content }}{% endfor %}",
    )
    processor.save_pretrained(folder)
    model = Qwen3VLForConditionalGeneration(_config(tokenizer)).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.15 * noise if parameter.ndim > 1 else 1 + 0.1 * noise)
    model.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | {"architectures": [type(model).__name__]}))
    return folder


def write_image(path: Path) -> Path:
    Image.frombytes("RGB", (96, 64), bytes(n % 251 for n in range(96 * 64 * 3))).save(path)
    return path


def greedy_answer(folder: Path, image: Path, new_tokens: int) -> list[int]:
    """What transformers' own model says of the image."""
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = Qwen3VLProcessor.from_pretrained(folder)(text=[PROMPT], images=[Image.open(image)], return_tensors="pt")
    said = model.generate(
        **inputs,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return said[0, inputs["input_ids"].shape[1] :].tolist()


def _tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    of_bytes = Tokenizer(models.BPE(vocab={c: n for n, c in enumerate(alphabet)}, merges=[]))
    of_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    of_bytes.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=of_bytes, eos_token=END, pad_token=END)
    tokenizer.add_special_tokens({"additional_special_tokens": [START_OF_IMAGE, END_OF_IMAGE, IMAGE, VIDEO]})
    return tokenizer


def _config(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLConfig:
    text = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [2, 3, 3],
            "mrope_interleaved": True,
        },
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "out_hidden_size": 64,
        "patch_size": PATCH,
        "deepstack_visual_indexes": [0, 1],
        "num_position_embeddings": 64,
    }
    start, end, image, video = tokenizer.convert_tokens_to_ids([START_OF_IMAGE, END_OF_IMAGE, IMAGE, VIDEO])
    return Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
    )
