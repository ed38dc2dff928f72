"""Signatures: what a pair may differ in, and what must be refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from scd_core.errors import ArtefactFormatError, SignatureMismatchError
from scd_core.huggingface import LoadedModel, tokenizer_hash, weight_fingerprint
from scd_core.signature import ModelSignature, check_pair
from tests.tiny import VARIANTS, tiny_loaded, tiny_model, tiny_tokenizer


@pytest.mark.parametrize("variant", VARIANTS)
def test_json_round_trip(variant: str) -> None:
    signature = tiny_loaded(variant).signature
    assert ModelSignature.from_json(json.loads(json.dumps(signature.to_json()))) == signature


def test_rope_is_recorded_with_its_scaling_per_layer_type() -> None:
    """DeepSpeed#8345: a default used silently. What the configuration says must be what is recorded."""
    scaled = tiny_loaded("llama-llama3").signature.rope["full_attention"]
    assert scaled["type"] == "llama3"
    assert (scaled["theta"], scaled["factor"], scaled["original_max_position_embeddings"]) == (1e4, 8.0, 64)
    gemma = tiny_loaded("gemma3").signature
    assert gemma.rope["sliding_attention"]["theta"] == 1e4
    assert gemma.rope["full_attention"]["theta"] == 1e6
    assert gemma.layer_types == ("sliding_attention", "full_attention", "sliding_attention")


def test_a_fine_tune_with_another_rope_fits(tiny_llama: LoadedModel) -> None:
    other = tiny_loaded("llama-yarn", seed=1).signature
    assert other.rope != tiny_llama.signature.rope
    assert other.fingerprint != tiny_llama.signature.fingerprint
    check_pair(tiny_llama.signature, other)
    check_pair(tiny_llama.signature, replace(other, max_positions=4096))


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"family": "qwen2"}, 'family: producer "llama", specialist "qwen2"'),
        ({"layers": 4}, "layers: producer 3, specialist 4"),
        ({"heads": 8}, "heads: producer 4, specialist 8"),
        ({"kv_heads": 4}, "kv_heads: producer 2, specialist 4"),
        ({"head_dim": 32}, "head_dim: producer 16, specialist 32"),
        ({"hidden_size": 128}, "hidden_size: producer 64, specialist 128"),
        ({"vocab_size": 322}, "vocab_size: producer 320, specialist 322"),
        ({"window": 8}, "window: producer null, specialist 8"),
        ({"qk_norm": True}, "qk_norm: producer false, specialist true"),
        ({"attn_softcap": 50.0}, "attn_softcap: producer null, specialist 50.0"),
        ({"tokenizer_hash": "00"}, "tokenizer_hash: producer "),
        ({"layer_types": ("full_attention",)}, "layer_types: producer "),
    ],
)
def test_a_mismatch_is_named_with_both_values(tiny_llama: LoadedModel, change: dict[str, Any], shown: str) -> None:
    with pytest.raises(SignatureMismatchError) as caught:
        check_pair(tiny_llama.signature, replace(tiny_llama.signature, **change))
    assert shown in str(caught.value)
    assert str(caught.value).count(": producer ") == 1, "only what differs is named"


def test_all_mismatches_are_reported_together(tiny_llama: LoadedModel) -> None:
    changed = replace(tiny_llama.signature, layers=4, head_dim=32, vocab_size=322)
    with pytest.raises(SignatureMismatchError, match=r"layers: .*head_dim: .*vocab_size: "):
        check_pair(tiny_llama.signature, changed)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: d.pop("rope"),
        lambda d: d.update(extra=1),
        lambda d: d.update(layers="3"),
        lambda d: d.update(kv_heads=0),
        lambda d: d.update(fingerprint=7),
        lambda d: d.update(rope=[]),
    ],
    ids=["missing", "unknown", "text", "zero", "number", "list"],
)
def test_a_malformed_signature_is_refused(tiny_llama: LoadedModel, spoil: Any) -> None:
    data = tiny_llama.signature.to_json()
    spoil(data)
    with pytest.raises(ArtefactFormatError, match="signature"):
        ModelSignature.from_json(data)


def test_one_changed_weight_changes_the_fingerprint() -> None:
    """vllm#55776: same name, other weights, accepted. Any parameter counts, the last one too."""
    model = tiny_model()
    before = weight_fingerprint(model)
    assert weight_fingerprint(tiny_model()) == before
    for parameter in model.parameters():
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter.view(-1)[-1] += 0.5
        assert weight_fingerprint(model) != before
        with torch.no_grad():
            parameter.copy_(kept)
    assert weight_fingerprint(model) == before


def test_two_swapped_matrices_change_the_fingerprint() -> None:
    """A sum over tensors without their names would not see it."""
    model = tiny_model()
    before = weight_fingerprint(model)
    attention = model.base_model.layers[0].self_attn
    attention.k_proj, attention.v_proj = attention.v_proj, attention.k_proj
    assert weight_fingerprint(model) != before


def test_tokenizer_hash_sees_ids_and_merges_but_no_template() -> None:
    """Base and specialist may end with other tokens and use other templates; the ids must mean the same."""
    before = tokenizer_hash(tiny_tokenizer())
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer("text", truncation=True, max_length=3)
    assert tokenizer_hash(tokenizer) == before
    assert tokenizer_hash(tiny_tokenizer(extra=2)) != before
