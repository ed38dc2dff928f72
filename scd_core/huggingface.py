"""All that is known of transformers' models (``paged.py`` knows its continuous batching, nothing else may).

Convention: outside this file content is ``[L, T, kv_dim]``, heads-major, keys de-rotated, float32; inside, a cache
layer is ``[1, kv_heads, T, head_dim]``, keys rotated, in the model's dtype. RoPE tables come from the model's own
rotary module, never recomputed. Longer than the other files because this knowledge must not spread.

Suffixes of tensors: L layers, T tokens, C kv_dim, H hidden size, R rotated dimensions of a head.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicCache

from scd_core.capture import ContentKV, StateChunk
from scd_core.errors import ModelUnavailableError, UnsupportedModelError
from scd_core.signature import ModelSignature


@dataclass(frozen=True)
class Family:
    """How a family computes keys and values.

    Attributes:
        fused: one ``qkv_proj`` instead of three projections.
        qk_norm: keys pass ``k_norm`` per head before RoPE.
        heads_first: ``k_norm`` sees ``[1, heads, T, head_dim]`` rather than ``[1, T, heads, head_dim]``.
        rope_per_type: the rotary module has a table per layer type.
        partial_rotary: RoPE may turn only the first dimensions of a head.
        windowed: the family may slide over a window.
        window_off: the window can be taken off by configuration.
    """

    fused: bool = False
    qk_norm: bool = False
    heads_first: bool = False
    rope_per_type: bool = False
    partial_rotary: bool = False
    windowed: bool = True
    window_off: bool = True


FAMILIES: Mapping[str, Family] = {
    "llama": Family(windowed=False),
    "mistral": Family(),
    "qwen2": Family(),
    "qwen3": Family(qk_norm=True),
    "phi3": Family(fused=True, partial_rotary=True),
    "gemma2": Family(window_off=False),
    "gemma3_text": Family(qk_norm=True, heads_first=True, rope_per_type=True, window_off=False),
}

ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""RoPE whose tables depend on the position alone. ``dynamic`` and ``longrope`` change with the sequence's length,
so that the keys of one prefix differ between prompts: no shared cache can be exact for them."""


@dataclass(frozen=True)
class LoadedModel:
    """A model ready for inference, its tokenizer and its signature.

    Build one with ``load_model``, or with ``LoadedModel.of`` from objects at hand.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    signature: ModelSignature
    source: str

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        source: str = "",
        *,
        fingerprint: str = "",
        limit: int | None = None,
    ) -> LoadedModel:
        """Wrap a model: evaluation mode, parameters frozen, signature taken.

        Args:
            fingerprint: of the weights, where it is known already.
            limit: no sequence will be longer than this.

        Raises:
            UnsupportedModelError: the family or a feature is not supported.
        """
        check_config(model.config)
        model.eval().requires_grad_(False)
        signature = signature_of(model, tokenizer, fingerprint)
        if limit is not None:
            signature = replace(signature, max_positions=min(limit, signature.max_positions))
        return cls(model, tokenizer, signature, source)

    @property
    def layers(self) -> int:
        return self.signature.layers

    @property
    def kv_heads(self) -> int:
        return self.signature.kv_heads

    @property
    def head_dim(self) -> int:
        return self.signature.head_dim

    @property
    def kv_dim(self) -> int:
        return self.signature.kv_dim

    @property
    def hidden_size(self) -> int:
        return self.signature.hidden_size

    @property
    def max_positions(self) -> int:
        return self.signature.max_positions

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.dtype
        return dtype

    @cached_property
    def family(self) -> Family:
        return FAMILIES[self.signature.family]

    def rotate(self, keys: Tensor, positions: Tensor, layers: Sequence[int] | None = None) -> Tensor:
        """Apply this model's RoPE: ``[L, T, C] -> [L, T, C]``, float32.

        Args:
            keys: de-rotated.
            positions: ``[T]``.
            layers: which layers the rows of ``keys`` are; all by default.
        """
        return self._turn(keys, positions, layers, back=False)

    def derotate(self, keys: Tensor, positions: Tensor, layers: Sequence[int] | None = None) -> Tensor:
        """The exact inverse of ``rotate``, a scaling of the tables (YaRN) included."""
        return self._turn(keys, positions, layers, back=True)

    def _turn(self, keys_LTC: Tensor, positions_T: Tensor, layers: Sequence[int] | None, back: bool) -> Tensor:
        layers = range(self.layers) if layers is None else layers
        if len(layers) != keys_LTC.shape[0] or positions_T.shape != keys_LTC.shape[1:2]:
            raise ValueError(
                f"keys {tuple(keys_LTC.shape)} for {len(layers)} layers and {tuple(positions_T.shape)} positions"
            )
        types = [self.signature.layer_types[i] if self.family.rope_per_type else "" for i in layers]
        x_LTHD = keys_LTC.float().unflatten(-1, (self.kv_heads, self.head_dim))
        tables = {kind: self._table(positions_T.to(keys_LTC.device), kind) for kind in dict.fromkeys(types)}
        if len(tables) == 1:
            return _turned(x_LTHD, *tables[types[0]], back).flatten(-2)
        rows = [_turned(x, *tables[kind], back) for x, kind in zip(x_LTHD, types, strict=True)]
        return torch.stack(rows).flatten(-2)

    def _table(self, positions_T: Tensor, layer_type: str) -> tuple[Tensor, Tensor]:
        """Cosines and sines, each ``[T, 1, R]``, float32, from the model's rotary module."""
        like = torch.empty(0, device=positions_T.device, dtype=torch.float32)
        extra = (layer_type,) if layer_type else ()
        with torch.no_grad():
            cos, sin = self.model.base_model.rotary_emb(like, positions_T[None], *extra)
        return cos[0, :, None], sin[0, :, None]

    def project(self, layer: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer from its normalised attention input.

        Args:
            hidden: H_in, ``[T, hidden]``.

        Returns:
            Keys ``[T, C]``, de-rotated, with biases and qk-norm, and values ``[T, C]``; float32. Differentiable.
        """
        attention = self._block(layer).self_attn
        hidden = hidden.to(self.device, self.dtype)
        if self.family.fused:
            keys, values = self.split(attention.qkv_proj(hidden))
        else:
            keys, values = attention.k_proj(hidden), attention.v_proj(hidden)
        if self.family.qk_norm:
            keys = attention.k_norm(keys.unflatten(-1, (self.kv_heads, self.head_dim))).flatten(-2)
        return keys.float(), values.float()

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a fused projection's ``[..., q + 2 C]``."""
        return qkv[..., -2 * self.kv_dim : -self.kv_dim], qkv[..., -self.kv_dim :]

    def _block(self, layer: int) -> Any:
        return self.model.base_model.layers[layer]

    def embedding_state(self, token_ids: Sequence[int] | Tensor) -> Tensor:
        """H_in of layer 0, ``[T, hidden]``, float32: it depends on the ids alone."""
        ids = torch.as_tensor(token_ids, device=self.device, dtype=torch.long)
        hidden: Tensor = self._block(0).input_layernorm(self.model.base_model.embed_tokens(ids))
        return hidden.float()

    def cache_from(self, keys: Tensor, values: Tensor, positions: Tensor) -> Any:
        """Content as this model's cache: rotated by its own RoPE, cut to the window where a layer slides.

        Args:
            keys, values: ``[L, T, C]``, keys de-rotated.
            positions: ``[T]``.

        Returns:
            A ``DynamicCache`` that holds T tokens. Gradients flow through it.
        """
        cache = DynamicCache(config=self.model.config)
        rotated = self.rotate(keys.to(self.device), positions)
        for layer in range(self.layers):
            cache.update(self._to_heads(rotated[layer]), self._to_heads(values[layer]), layer)
        return cache

    def _to_heads(self, x_TC: Tensor) -> Tensor:
        """``[T, C] -> [1, kv_heads, T, head_dim]`` in the model's dtype."""
        heads = x_TC.to(self.device, self.dtype).unflatten(-1, (self.kv_heads, self.head_dim))
        return heads.transpose(0, 1)[None]

    def content_of(self, cache: Any, start: int, stop: int) -> ContentKV:
        """Content of tokens ``start..stop`` of this model's cache: ``cache_from``'s way back.

        Raises:
            UnsupportedModelError: a sliding layer has dropped some of these tokens (use ``capture``).
        """
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for layer, held in enumerate(cache.layers):
            dropped = held.get_seq_length() - held.keys.shape[-2]
            if start < dropped or stop > held.get_seq_length():
                raise UnsupportedModelError(
                    f"layer {layer}'s cache holds tokens {dropped}..{held.get_seq_length()}, not {start}..{stop}"
                )
            for parts, held_part in ((keys, held.keys), (values, held.values)):
                parts.append(held_part[0, :, start - dropped : stop - dropped].transpose(0, 1).flatten(-2).float())
        positions = torch.arange(start, stop, device=self.device)
        return ContentKV(self.derotate(torch.stack(keys), positions), torch.stack(values))

    def prefill(self, past: ContentKV | None = None) -> Prefill:
        """A prefill that continues after ``past`` and records what it computes (see ``capture``)."""
        if past is None or past.tokens == 0:
            return Prefill(self, DynamicCache(config=self.model.config))
        return Prefill(self, self.cache_from(past.keys, past.values, torch.arange(past.tokens)))

    @cached_property
    def shell(self) -> Any:
        """``plain_shell`` of the model, made once: ordinary forwards while continuous batching runs the model."""
        return plain_shell(self.model)

    @cached_property
    def recording(self) -> Lock:
        """Held while hooks sit on ``shell``: two threads' captures must not record each other's state."""
        return Lock()


def _turned(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    """RoPE of ``x`` ``[..., T, heads, head_dim]``, or its inverse; dimensions beyond R pass."""
    turning, passing = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turning.chunk(2, dim=-1)
    across = torch.cat((-second, first), dim=-1)
    # cos^2 + sin^2 is 1, or the square of the factor that YaRN puts into the tables
    turned = (turning * cos - across * sin) / (cos**2 + sin**2) if back else turning * cos + across * sin
    return torch.cat((turned, passing), dim=-1) if passing.shape[-1] else turned


@dataclass
class Prefill:
    """A prefill in steps, on the plain shell, so that hooks never touch a model that others run."""

    loaded: LoadedModel
    cache: Any

    def step(self, start: int, token_ids: Sequence[int], hidden_layers: Sequence[int]) -> StateChunk:
        """Prefill the next tokens, which start at position ``start``, and return their state."""
        shell = self.loaded.shell
        ids = torch.as_tensor(token_ids, device=self.loaded.device, dtype=torch.long)
        with self.loaded.recording, torch.no_grad(), _recording(self.loaded, shell, hidden_layers) as record:
            shell.base_model(input_ids=ids[None], cache=self.cache, use_cache=True)
        layers = range(self.loaded.layers)
        content = ContentKV(
            torch.stack([record.keys[i] for i in layers]), torch.stack([record.values[i] for i in layers])
        )
        return StateChunk(start, content, record.hidden)


@dataclass
class _Record:
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    hidden: dict[int, Tensor] = field(default_factory=dict)


@contextmanager
def _recording(loaded: LoadedModel, shell: Any, hidden_layers: Sequence[int]) -> Iterator[_Record]:
    """Record content keys and values of all layers, and H_in of some, while the context lasts."""
    record, family = _Record(), loaded.family
    handles: list[Any] = []

    def listen(module: Any, keep: Callable[[int, Tensor], None], layer: int) -> None:
        handles.append(module.register_forward_hook(lambda _module, _args, out: keep(layer, out)))

    def keys(layer: int, out: Tensor) -> None:
        record.keys[layer] = out[0].float()

    def normed_keys(layer: int, out: Tensor) -> None:
        record.keys[layer] = (out[0].transpose(0, 1) if family.heads_first else out[0]).flatten(-2).float()

    def values(layer: int, out: Tensor) -> None:
        record.values[layer] = out[0].float()

    def fused(layer: int, out: Tensor) -> None:
        record.keys[layer], record.values[layer] = (x.float() for x in loaded.split(out[0]))

    def hidden(layer: int, out: Tensor) -> None:
        record.hidden[layer] = out[0].float()

    try:
        for layer, block in enumerate(shell.base_model.layers):
            attention = block.self_attn
            if family.fused:
                listen(attention.qkv_proj, fused, layer)
            else:
                listen(attention.v_proj, values, layer)
                listen(*((attention.k_norm, normed_keys) if family.qk_norm else (attention.k_proj, keys)), layer)
            if layer in hidden_layers:
                listen(block.input_layernorm, hidden, layer)
        yield record
    finally:
        for handle in handles:
            handle.remove()


def plain_shell(model: PreTrainedModel) -> PreTrainedModel:
    """A second shell over the same parameters, with a configuration of its own and ordinary attention.

    A continuous-batching manager that lives on ``model`` chooses its attention; where that is ``paged|eager``, an
    ordinary forward fails or attends without a mask (transformers#48735). The shell's forward does not notice.
    """
    shared: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    # the manager hangs on the model; its threads and locks can be neither copied nor shared
    manager = getattr(model, "_cached_continuous_batching_manager", None)
    if manager is not None:
        shared[id(manager)] = manager
    shell = copy.deepcopy(model, shared)
    shell.__dict__.pop("_cached_continuous_batching_manager", None)
    shell.config._attn_implementation = _attention(shell.config)
    return shell


def _attention(config: Any) -> str:
    """SDPA, or eager where attention logits are capped, which SDPA cannot do."""
    return "sdpa" if getattr(config, "attn_logit_softcapping", None) is None else "eager"


def check_config(config: Any) -> None:
    """Refuse what cannot be handled exactly.

    Raises:
        UnsupportedModelError: names the family or the feature.
    """
    family = config.model_type
    if family not in FAMILIES:
        raise UnsupportedModelError(f"family {family!r} is not supported; supported are {', '.join(FAMILIES)}")
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModelError(f"{family}: quantised weights are not supported")
    if getattr(config, "use_bidirectional_attention", None):
        raise UnsupportedModelError(f"{family}: bidirectional attention is not supported")
    types = _layer_types(config)
    if unknown := set(types) - {"full_attention", "sliding_attention"}:
        raise UnsupportedModelError(f"{family}: layers of type {', '.join(sorted(unknown))} are not supported")
    if "sliding_attention" in types and not FAMILIES[family].windowed:
        raise UnsupportedModelError(f"{family}: a sliding window is not supported in this family")
    for kind, rope in _rope(config).items():
        if rope["type"] not in ROPE_TYPES:
            raise UnsupportedModelError(
                f"{family}: RoPE scaling {rope['type']!r} ({kind}) is not supported; supported are "
                f"{', '.join(sorted(ROPE_TYPES))}"
            )
        if rope.get("partial_rotary_factor", 1.0) != 1.0 and not FAMILIES[family].partial_rotary:
            raise UnsupportedModelError(f"{family}: partial_rotary_factor is not supported in this family")


def _layer_types(config: Any) -> list[str]:
    """Per layer, as ``DynamicCache`` reads them."""
    if (types := getattr(config, "layer_types", None)) is not None:
        return list(types)
    windowed = getattr(config, "sliding_window", None) is not None
    return ["sliding_attention" if windowed else "full_attention"] * config.num_hidden_layers


def _rope(config: Any) -> dict[str, dict[str, Any]]:
    """RoPE parameters per layer type present, canonical: ``{"type", "theta", others as configured}``."""
    parameters = config.rope_parameters
    canonical = {}
    for kind in sorted(set(_layer_types(config))):
        own = dict(parameters[kind] if FAMILIES[config.model_type].rope_per_type else parameters)
        if own.get("rope_theta") is None:
            raise UnsupportedModelError(f"{config.model_type}: the configuration has no rope_theta")
        name = own.pop("rope_type", None) or own.pop("type", None) or "default"
        own.pop("type", None)
        canonical[kind] = {"type": name, "theta": float(own.pop("rope_theta")), **dict(sorted(own.items()))}
    return canonical


def signature_of(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, fingerprint: str = ""
) -> ModelSignature:
    """A model's signature; the weights are hashed unless a fingerprint is given."""
    config = model.config
    types = tuple(_layer_types(config))
    return ModelSignature(
        family=config.model_type,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=model.base_model.layers[0].self_attn.head_dim,
        hidden_size=config.hidden_size,
        vocab_size=model.base_model.embed_tokens.weight.shape[0],
        rope=_rope(config),
        window=config.sliding_window if "sliding_attention" in types else None,
        layer_types=types,
        qk_norm=FAMILIES[config.model_type].qk_norm,
        attn_softcap=getattr(config, "attn_logit_softcapping", None),
        tokenizer_hash=tokenizer_hash(tokenizer),
        fingerprint=fingerprint or weight_fingerprint(model),
        max_positions=config.max_position_embeddings,
    )


def weight_fingerprint(model: nn.Module) -> str:
    """32 hex digits over every parameter's name, shape and values as bfloat16.

    bfloat16, so that a model loaded in another precision than its file's is recognised.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in sorted(model.named_parameters()):
        _update(digest, name, parameter.detach())
    return digest.hexdigest()


def _update(digest: hashlib.blake2b, name: str, tensor: Tensor) -> None:
    digest.update(f"{name}{tuple(tensor.shape)}".encode())
    values: Any = tensor.to("cpu", torch.bfloat16).contiguous().view(-1).view(torch.uint8).numpy()
    digest.update(values)


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """32 hex digits over the vocabulary (added tokens with it) and the merges."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    merges: Any = []
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        merges = json.loads(backend.to_str())["model"].get("merges") or []
    text = json.dumps([vocabulary, [m.split(" ", 1) if isinstance(m, str) else m for m in merges]])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def load_model(
    source: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: str | None = None,
    base: str | Path | None = None,
    limit: int | None = None,
) -> LoadedModel:
    """Load a model and its tokenizer; only safetensors, never remote code.

    Args:
        source: hub id, local folder, or local peft folder, whose adapter is merged.
        dtype: float32 on CPU and bfloat16 on CUDA by default.
        device: "cuda" where there is one, else "cpu".
        base: a peft folder's base model; by default what the adapter names.
        limit: no sequence will be longer than this. A window that it never reaches is then taken off, where the
            family allows it (not Gemma), so that the model can be served from a shared cache.

    Raises:
        UnsupportedModelError: the family, or a feature of it, is not supported.
        ModelUnavailableError: files are missing or damaged; the message says what to do.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or (torch.bfloat16 if device.startswith("cuda") else torch.float32)
    folder = Path(source)
    if not (folder / "adapter_config.json").is_file():
        model = _load_base(str(source), limit)
        loaded_from, fingerprint = str(source), weight_fingerprint(model)
    else:
        loaded_from = str(base or _adapter_base(folder))
        model = _load_base(loaded_from, limit)
        fingerprint = _adapter_fingerprint(model, folder)
        model = _merged(model, folder)
    # after the fingerprint; parameters only: RoPE's tables must stay float32
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    own_tokenizer = (folder / "tokenizer_config.json").is_file()
    tokenizer = _load_tokenizer(str(source) if own_tokenizer else loaded_from)
    rows, highest = model.base_model.embed_tokens.weight.shape[0], max(tokenizer.get_vocab().values())
    if highest >= rows:
        raise UnsupportedModelError(
            f"{source}: the tokenizer's ids go up to {highest}, but the model embeds only {rows}; "
            "save model and tokenizer after resizing both"
        )
    return LoadedModel.of(model.to(device), tokenizer, str(source), fingerprint=fingerprint, limit=limit)


def _load_base(source: str, limit: int | None) -> Any:
    if Path(source).is_dir() and not (Path(source) / "config.json").is_file():
        raise ModelUnavailableError(f"{source}: no config.json: not a model's folder")
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except OSError as error:
        raise ModelUnavailableError(f"{source}: no configuration found: {error}") from error
    except (ValueError, KeyError) as error:
        raise UnsupportedModelError(f"{source}: {error}") from error
    check_config(config)
    _drop_idle_window(config, limit)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype="auto",
            use_safetensors=True,
            trust_remote_code=False,
            attn_implementation=_attention(config),
            output_loading_info=True,
        )
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ModelUnavailableError(
            f"{source}: weights cannot be read; the folder must hold intact *.safetensors: {error}"
        ) from error
    if faults := [
        f"{kind}: {sorted(map(str, info[kind]))[:3]}" for kind in ("missing_keys", "mismatched_keys") if info[kind]
    ]:
        raise ModelUnavailableError(f"{source}: the weights do not fit the configuration ({'; '.join(faults)})")
    return model


def _drop_idle_window(config: Any, limit: int | None) -> None:
    """Take off a window that no sequence can reach, where the configuration alone decides on it."""
    longest = min(limit or config.max_position_embeddings, config.max_position_embeddings)
    types = _layer_types(config)
    if "sliding_attention" not in types or not FAMILIES[config.model_type].window_off:
        return
    if config.sliding_window >= longest:
        config.sliding_window = None
        if getattr(config, "layer_types", None) is not None:
            config.layer_types = ["full_attention"] * len(types)


def _load_tokenizer(source: str) -> Any:
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelUnavailableError(f"{source}: no tokenizer found: {error}") from error


def _adapter_base(folder: Path) -> str:
    named = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not named:
        raise ModelUnavailableError(f"{folder}: the adapter names no base model; give one (base=)")
    return str(named)


def _adapter_fingerprint(base: nn.Module, folder: Path) -> str:
    """Of the base's weights, the adapter's and its settings: a merge's last bits differ between processors."""
    settings = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    settings.pop("base_model_name_or_path", None)
    digest = hashlib.blake2b(weight_fingerprint(base).encode(), digest_size=16)
    digest.update(json.dumps(settings, sort_keys=True).encode())
    try:
        tensors = load_file(folder / "adapter_model.safetensors")
    except (OSError, SafetensorError) as error:
        raise ModelUnavailableError(
            f"{folder}: adapter_model.safetensors is missing or damaged: {error}"
        ) from error
    for name, tensor in sorted(tensors.items()):
        _update(digest, name, tensor)
    return digest.hexdigest()


def _merged(model: Any, folder: Path) -> Any:
    """The adapter merged in float32, so that the result does not depend on the dtype asked for later."""
    from peft import PeftModel, get_peft_model_state_dict

    try:
        adapted = PeftModel.from_pretrained(model.float(), str(folder))
    except (RuntimeError, ValueError, KeyError) as error:
        raise UnsupportedModelError(f"{folder}: the adapter does not fit its base model: {error}") from error
    # peft skips tensors it finds no place for, and leaves others as they were: the base would be served silently
    theirs = set(load_file(folder / "adapter_model.safetensors"))
    ours = set(get_peft_model_state_dict(adapted, save_embedding_layers=False))
    stray = {name for name in theirs - ours if "embed_tokens" not in name and "lm_head" not in name}
    if faults := sorted(stray | (ours - theirs)):
        raise UnsupportedModelError(
            f"{folder}: the adapter does not fit its base model: {len(faults)} tensors have no counterpart, "
            f"the first is {faults[0]}"
        )
    return adapted.merge_and_unload()
