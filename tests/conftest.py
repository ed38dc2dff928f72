"""Fixtures shared by all tests."""

from __future__ import annotations

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
