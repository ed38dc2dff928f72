"""Attention over the paged cache on a CPU, one request at a time.

transformers' own way without flash attention is one dense mask over *all* requests of a batch: with 16 requests,
each query looks at 16 times too many keys, and keys are copied once per query head. Here every request attends to
its own keys only. The layout is that of transformers' continuous batching: queries of all requests in a row, and
for each request its whole past and its new keys in a row; ``cu_seq_lens_q`` and ``cu_seq_lens_k`` are the bounds.

The function is registered under a name of its own. An ordinary forward, which brings no bounds, falls through to
transformers' SDPA, so a model that is being served can be called directly as well.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "scd_paged"


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of packed requests.

    Args:
        query: ``[1, heads, Q, head_dim]``, Q the new tokens of all requests.
        key, value: ``[1, kv_heads, K, head_dim]``, K the past and new tokens of all requests.

    Returns ``[1, Q, heads, head_dim]``.
    """
    if kwargs.get("cu_seq_lens_q") is None:
        if softcap is not None:
            kwargs["softcap"] = softcap  # refused there, by name
        if sliding_window is not None:
            kwargs["sliding_window"] = sliding_window
        out: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return out
    if getattr(module, "sinks", None) is not None:
        raise NotImplementedError("attention with learned sinks")
    bounds_q, bounds_k = kwargs["cu_seq_lens_q"].tolist(), kwargs["cu_seq_lens_k"].tolist()
    out_BQHD = query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
    for start_q, stop_q, start_k, stop_k in zip(bounds_q, bounds_q[1:], bounds_k, bounds_k[1:], strict=False):
        attended = _attend(
            query[:, :, start_q:stop_q],
            key[:, :, start_k:stop_k],
            value[:, :, start_k:stop_k],
            scaling,
            sliding_window,
            softcap,
        )
        out_BQHD[:, start_q:stop_q] = attended.transpose(1, 2)
    return out_BQHD, None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None, softcap: float | None
) -> Tensor:
    """One request: the last ``q`` of its ``k`` tokens attend to it causally. ``[1, heads, q, head_dim]``."""
    heads, kv_heads, queries, keys = query.shape[1], key.shape[1], query.shape[2], key.shape[2]
    windowed = window is not None and keys > window
    if queries == 1 and not windowed and softcap is None:
        # a single new token sees everything: the query heads of a key head become its queries, nothing is copied
        packed = query.reshape(1, kv_heads, heads // kv_heads, query.shape[-1])
        return scaled_dot_product_attention(packed, key, value, scale=scaling).view(1, heads, 1, value.shape[-1])
    if queries == keys and not windowed and softcap is None:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    visible = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
    if window is not None and windowed:
        visible = visible.triu(keys - queries - window + 1)
    if softcap is None:
        return scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scaling, enable_gqa=True)
    key, value = (tensor.repeat_interleave(heads // kv_heads, dim=1) for tensor in (key, value))
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = (torch.tanh(scores / softcap) * softcap).masked_fill(~visible, float("-inf"))
    return scores.float().softmax(-1).to(query.dtype) @ value


AttentionInterface.register(NAME, paged_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
