"""Fixtures shared by all tests."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest
import torch

from scd_core.huggingface import LoadedModel
from tests.tiny import tiny_loaded


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny models lose more to threads than they gain, and results must not depend on the machine's cores."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_llama() -> LoadedModel:
    """A tiny random Llama; do not change it."""
    return tiny_loaded("llama")


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One local Ray for all tests that need it, with a scratch home: a stray token or file must not matter."""
    from app.serve import running_ray

    # Ray's sockets lie below it, and their paths may have 107 characters
    scratch = tempfile.mkdtemp(prefix="scd-", dir="/tmp")
    kept = {name: os.environ.get(name) for name in ("HOME", "SCD_HOME", "OMP_NUM_THREADS")}
    os.environ.update(HOME=scratch, SCD_HOME=f"{scratch}/scd", OMP_NUM_THREADS="1")
    try:
        with running_ray(_temp_dir=f"{scratch}/ray", num_cpus=8):
            yield
    finally:
        for name, value in kept.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        shutil.rmtree(scratch, ignore_errors=True)
