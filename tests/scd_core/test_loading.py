"""Loading: folders, adapters, and files that must be refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file

from scd_core.errors import ModelUnavailableError, UnsupportedModelError
from scd_core.huggingface import load_model, weight_fingerprint
from scd_core.signature import check_pair, serving_refusal
from tests.tiny import WINDOW, tiny_adapter, tiny_folder, tiny_ids, tiny_model, tiny_tokenizer

IDS = torch.tensor([tiny_ids(12)])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("base"))


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


@pytest.fixture(scope="module")
def adapter(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_adapter(tmp_path_factory.mktemp("adapter"), saved)


def test_a_folder_gives_the_saved_model(saved: Path) -> None:
    loaded = load_model(saved)
    assert torch.equal(loaded.model(input_ids=IDS).logits, tiny_model()(input_ids=IDS).logits)
    assert not any(p.requires_grad for p in loaded.model.parameters())
    assert not loaded.model.training
    assert (loaded.dtype, loaded.source) == (torch.float32, str(saved))
    assert loaded.tokenizer.decode(loaded.tokenizer("zażółć 🦊").input_ids) == "zażółć 🦊"
    assert loaded.signature.fingerprint == weight_fingerprint(tiny_model())


def test_bfloat16_keeps_rope_in_float32_and_the_fingerprint(saved: Path) -> None:
    """``model.to(bfloat16)`` would round RoPE's frequencies too: keys drift with the position."""
    loaded = load_model(saved, dtype=torch.bfloat16)
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}
    rotary = loaded.model.base_model.rotary_emb.inv_freq
    assert torch.equal(rotary, load_model(saved).model.base_model.rotary_emb.inv_freq)
    assert loaded.signature == load_model(saved).signature


def test_an_adapter_is_merged_into_its_base(saved: Path, adapter: Path) -> None:
    loaded, base = load_model(adapter), tiny_model()
    lora = load_file(adapter / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers.1.self_attn.v_proj.lora_"
    delta = 2.0 * lora[f"{prefix}B.weight"] @ lora[f"{prefix}A.weight"]
    merged = loaded.model.base_model.layers[1].self_attn.v_proj.weight
    assert torch.allclose(merged, base.base_model.layers[1].self_attn.v_proj.weight + delta, atol=1e-6)
    assert not any("lora" in name for name, _ in loaded.model.named_parameters())
    check_pair(load_model(saved).signature, loaded.signature)


def test_an_adapters_fingerprint_names_base_and_adapter(saved: Path, adapter: Path, tmp_path: Path) -> None:
    """The same whatever the dtype and the processor; another base or another adapter gives another."""
    expected = load_model(adapter).signature.fingerprint
    assert load_model(adapter, dtype=torch.bfloat16).signature.fingerprint == expected
    other_base = tiny_folder(tmp_path / "base", seed=5)
    other_adapter = tiny_adapter(tmp_path / "adapter", saved, seed=5)
    found = {
        expected,
        load_model(saved).signature.fingerprint,
        load_model(adapter, base=other_base).signature.fingerprint,
        load_model(other_adapter).signature.fingerprint,
    }
    assert len(found) == 4


def test_moving_the_base_keeps_an_adapters_fingerprint(folder: Path, adapter: Path) -> None:
    assert load_model(adapter, base=folder).signature == load_model(adapter).signature


def test_an_adapters_own_tokenizer_is_used(adapter: Path, saved: Path, tmp_path: Path) -> None:
    """A specialist's template differs from its base's (vllm#27515)."""
    own = Path(shutil.copytree(adapter, tmp_path / "own"))
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "own"
    tokenizer.save_pretrained(own)
    assert load_model(own, base=saved).tokenizer.chat_template == "own"
    assert load_model(adapter).tokenizer.chat_template == load_model(saved).tokenizer.chat_template


def test_an_adapter_of_another_shape_is_refused(adapter: Path, tmp_path: Path) -> None:
    wide = tiny_folder(tmp_path / "wide", hidden_size=96)
    with pytest.raises(UnsupportedModelError, match="does not fit its base model"):
        load_model(adapter, base=wide)


def test_an_adapter_for_absent_layers_is_refused(adapter: Path, tmp_path: Path) -> None:
    """vllm#34186: an adapter that matches nothing serves the base silently."""
    short = tiny_folder(tmp_path / "short", num_hidden_layers=2)
    with pytest.raises(UnsupportedModelError, match="does not fit its base model"):
        load_model(adapter, base=short)


def test_a_damaged_adapter_is_refused(adapter: Path, saved: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(adapter, tmp_path / "damaged"))
    (damaged / "adapter_model.safetensors").write_bytes(b"\0" * 64)
    with pytest.raises(ModelUnavailableError, match=r"adapter_model\.safetensors is missing or damaged"):
        load_model(damaged, base=saved)


def test_an_adapter_without_a_base_is_refused(adapter: Path, tmp_path: Path) -> None:
    orphan = Path(shutil.copytree(adapter, tmp_path / "orphan"))
    settings = json.loads((orphan / "adapter_config.json").read_text())
    (orphan / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": None}))
    with pytest.raises(ModelUnavailableError, match="names no base model"):
        load_model(orphan)


def test_truncated_weights_are_refused(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ModelUnavailableError, match="intact"):
        load_model(folder)


def test_missing_tensors_are_refused(folder: Path) -> None:
    """transformers fills them with random numbers and a warning."""
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelUnavailableError, match=r"missing_keys.*layers\.1\.self_attn\.k_proj"):
        load_model(folder)


def test_pickled_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelUnavailableError, match="safetensors"):
        load_model(folder)


def test_an_absent_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelUnavailableError, match=r"no config\.json"):
        load_model(tmp_path)
    with pytest.raises(ModelUnavailableError, match="nobody/no-such-model"):
        load_model("nobody/no-such-model")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "gpt2"}, "family 'gpt2'"),
        ({"model_type": "of-the-future"}, "of-the-future"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "'dynamic'"),
    ],
)
def test_unsupported_configurations_are_refused_before_weights_are_read(
    folder: Path, change: dict[str, object], reason: str
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError, match=reason):
        load_model(folder)


def test_remote_code_never_runs(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "remote",
        "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    ran = folder / "ran"
    (folder / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass Config: pass\nclass Model: pass\n")
    with pytest.raises(UnsupportedModelError):
        load_model(folder)
    assert not ran.exists()


def test_a_tokenizer_beyond_the_embedding_is_refused(folder: Path) -> None:
    """LlamaFactory#7997: tokens were added, the model was not resized; an index error at the first use."""
    tiny_tokenizer(extra=60).save_pretrained(folder)
    with pytest.raises(UnsupportedModelError, match=r"ids go up to 326, but the model embeds only 320"):
        load_model(folder)


@pytest.mark.parametrize("variant", ["mistral-window", "qwen2-window", "phi3-window"])
def test_a_window_that_is_never_reached_is_taken_off(variant: str, tmp_path: Path) -> None:
    """Up to the limit the answer is the windowed model's own; one token more and the window stays."""
    folder = tiny_folder(tmp_path / "model", variant)
    windowed, open_ = load_model(folder), load_model(folder, limit=WINDOW)
    assert serving_refusal(windowed.signature) is not None
    assert serving_refusal(open_.signature) is None
    assert open_.max_positions == WINDOW
    assert torch.allclose(windowed.model(input_ids=IDS).logits, open_.model(input_ids=IDS).logits, atol=1e-5)
    assert load_model(folder, limit=WINDOW + 1).signature.window == WINDOW


def test_gemma_keeps_its_window(tmp_path: Path) -> None:
    """Its layer types choose the RoPE too."""
    folder = tiny_folder(tmp_path / "model", "gemma3")
    assert load_model(folder, limit=4).signature.window == WINDOW
