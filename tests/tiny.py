"""Tiny random models of every supported family, and a byte-level tokenizer for them.

Weights are drawn wide (0.15 rather than 0.02), norms and biases too: attention then depends on positions and no
term can be left out unnoticed.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from scd_core.huggingface import LoadedModel

VOCAB = 320
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "phi3": Phi3Config,
    "gemma2": Gemma2Config,
    "gemma3_text": Gemma3TextConfig,
}

WINDOW = 12
_ROPE = {"rope_theta": 10_000.0}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biases": ("llama", {"attention_bias": True}),
    "llama-wide-heads": ("llama", {"head_dim": 24}),
    "llama-linear": ("llama", {"rope_parameters": {**_ROPE, "rope_type": "linear", "factor": 2.0}}),
    "llama-llama3": ("llama", {"rope_parameters": {**_ROPE, **_LLAMA3}}),
    "llama-yarn": ("llama", {"rope_parameters": {**_ROPE, **_YARN}}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": WINDOW}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "phi3": ("phi3", {}),
    "phi3-window": ("phi3", {"sliding_window": WINDOW}),
    "phi3-partial": ("phi3", {"rope_parameters": {**_ROPE, "rope_type": "default", "partial_rotary_factor": 0.5}}),
    "gemma2": ("gemma2", {"sliding_window": WINDOW, "head_dim": 16, "query_pre_attn_scalar": 16}),
    "gemma3": (
        "gemma3_text",
        {"sliding_window": WINDOW, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window_pattern": 2},
    ),
}
"""Every family with each feature that changes its keys, its values or what a query sees."""


def tiny_config(variant: str = "llama", **overrides: Any) -> Any:
    """A configuration of some thousand parameters per layer."""
    family, features = VARIANTS[variant]
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    return _CONFIGS[family](**{**settings, **features, **overrides})


def tiny_model(variant: str = "llama", seed: int = 0, **overrides: Any) -> Any:
    """A random model; the same seed gives the same weights."""
    config = tiny_config(variant, **overrides)
    attention = "sdpa" if getattr(config, "attn_logit_softcapping", None) is None else "eager"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.15
            # one-dimensional parameters are norms (about 1, or 0 in Gemma) and biases (about 0)
            parameter.copy_(parameter + 2 * noise if parameter.ndim == 1 else noise)
    return model.eval()


@cache
def _tokenizer_file(extra: int) -> str:
    """Byte-level BPE without a corpus: 256 bytes, a few merges, the specials."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("a", "n"), ("Ġ", "a"), ("e", "r"), ("o", "n")]
    tokens = [*SPECIALS, *alphabet, *(a + b for a, b in pairs)]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*SPECIALS, *(f"<|extra_{i}|>" for i in range(extra))])
    return tokenizer.to_str()


def tiny_tokenizer(extra: int = 0) -> PreTrainedTokenizerFast:
    """A tokenizer that round-trips every text, with a chat template; ``extra`` appends as many special tokens."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_tokenizer_file(extra)),
        bos_token=SPECIALS[0],
        pad_token=SPECIALS[0],
        eos_token=SPECIALS[2],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_loaded(variant: str = "llama", seed: int = 0, **overrides: Any) -> LoadedModel:
    """A random model with the tokenizer, as ``load_model`` would return it."""
    return LoadedModel.of(tiny_model(variant, seed, **overrides), tiny_tokenizer(), f"tiny-{variant}-{seed}")


def tiny_folder(folder: Path, variant: str = "llama", seed: int = 0, **overrides: Any) -> Path:
    """A random model saved as a model folder."""
    tiny_model(variant, seed, **overrides).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def tiny_adapter(folder: Path, base: Path, seed: int = 0, targets: tuple[str, ...] = ("q_proj", "v_proj")) -> Path:
    """A random LoRA over a saved model, saved as a peft folder without a tokenizer."""
    from peft import LoraConfig, get_peft_model

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=list(targets)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    adapted.save_pretrained(folder)
    return folder


def tiny_ids(tokens: int, seed: int = 0) -> list[int]:
    """Random ordinary token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(len(SPECIALS), 256, (tokens,), generator=generator).tolist()
