"""Asynchronous tests run on asyncio."""

from __future__ import annotations

import pytest

from tests.app.memory import Client, MemoryPool


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def pool() -> MemoryPool:
    return MemoryPool()


@pytest.fixture
def client(pool: MemoryPool) -> Client:
    return Client(pool)
