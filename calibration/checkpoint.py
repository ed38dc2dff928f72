"""A training run's state in one safetensors file, replaced atomically: a killed calibration goes on from it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from scd_core.errors import CorpusError


def save_checkpoint(
    path: Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    curve: list[float],
    settings: dict[str, Any],
) -> None:
    """Writes parameters, Adam's moments, the step reached, the curve so far and the settings of the run."""
    tensors = {f"parameter.{name}": p.detach().contiguous() for name, p in module.named_parameters()}
    for name, p in module.named_parameters():
        for key, value in optimizer.state.get(p, {}).items():
            tensors[f"{key}.{name}"] = value.detach().clone().contiguous()
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    save_file(tensors, draft, {"run": json.dumps({"step": step, "curve": curve, "settings": settings})})
    os.replace(draft, path)


def load_checkpoint(
    path: Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LambdaLR,
    settings: dict[str, Any],
) -> tuple[int, list[float]]:
    """Restores a run and returns ``(step, curve)``.

    Raises:
        CorpusError: the checkpoint belongs to a run with other settings, or cannot be read.
    """
    try:
        with safe_open(path, "pt") as file:
            run = json.loads(file.metadata()["run"])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CorpusError(f"{path}: not a checkpoint ({error}); delete it to start afresh") from error
    if run["settings"] != settings:
        raise CorpusError(f"{path}: of a run with other settings; delete it, or use those: {run['settings']}")
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(tensors[f"parameter.{name}"])
            keys = {k.removesuffix(f".{name}") for k in tensors if k.endswith(f".{name}")} - {"parameter"}
            if keys:
                optimizer.state[p] = {key: tensors[f"{key}.{name}"] for key in keys}
    schedule.last_epoch = run["step"]
    for group, factor in zip(optimizer.param_groups, schedule.lr_lambdas, strict=True):
        group["lr"] = group["initial_lr"] * factor(run["step"])
    return run["step"], run["curve"]
