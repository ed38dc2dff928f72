"""Packages import downwards only, and nothing that runs code is ever read from a file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = {"app", "deployments", "calibration", "scd_core", "loadtest", "tests"}

# Which of our packages each may import, beside itself.
BELOW = {
    "scd_core": set(),
    "calibration": {"scd_core"},
    "deployments": {"scd_core"},
    "app": {"deployments", "calibration", "scd_core"},
    "loadtest": set(),  # an outside client: it sees HTTP and nothing else
}
HTTP = {"fastapi", "starlette", "uvicorn", "httpx", "requests", "aiohttp"}
FORBIDDEN = {
    "scd_core": {"ray", *HTTP},
    "calibration": HTTP,
    "deployments": HTTP,
    "app": set(),
    "loadtest": {"ray", "torch", "transformers"},
}
UNSAFE = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
SOURCES = sorted(p for package in BELOW for p in (ROOT / package).rglob("*.py"))


def imported(source: str, package: str) -> Iterator[str]:
    """Every module a file names: at its head, inside functions, relative, or by ``import_module``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield package if node.level else (node.module or "")
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in {"import_module", "__import__"} and isinstance(node.args[0].value, str):
                yield node.args[0].value


def faults(source: str, package: str) -> list[str]:
    """The imports of a file of ``package`` that it must not have."""
    upward = OURS - BELOW[package] - {package}
    return sorted(
        {m for m in imported(source, package) if m.split(".")[0] in upward | FORBIDDEN[package] | UNSAFE}
    )


def test_every_package_is_looked_at() -> None:
    """A package added without a rule would pass unseen."""
    found = {p.parent.name for p in ROOT.glob("*/*.py")} - {"tests"}
    assert found <= set(BELOW), "a package without a rule in BELOW"
    assert {"scd_core", "calibration", "app"} <= found


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_run_downwards(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    assert faults(path.read_text(encoding="utf-8"), package) == []


@pytest.mark.parametrize(
    ("source", "package", "expected"),
    [
        ("import ray", "scd_core", ["ray"]),
        ("def f():\n    from calibration import corpus", "scd_core", ["calibration"]),
        ("from deployments.transport import inline", "calibration", ["deployments.transport"]),
        ("if True:\n    import app.cli", "deployments", ["app.cli"]),
        ("import importlib\nimportlib.import_module('app.api')", "deployments", ["app.api"]),
        ("from scd_core import wire", "loadtest", ["scd_core"]),
        ("from pickle import loads", "scd_core", ["pickle"]),
        ("import tests.tiny", "app", ["tests.tiny"]),
        ("from scd_core import wire\nfrom . import corpus", "calibration", []),
    ],
)
def test_the_check_finds_what_it_looks_for(source: str, package: str, expected: list[str]) -> None:
    """An import inside a function or a condition, or by name, is an import like any other."""
    assert faults(source, package) == expected


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_torch_load(path: Path) -> None:
    """``torch.load`` and ``trust_remote_code=True`` run what a file says; artefacts are safetensors and JSON."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert (node.value.id, node.attr) != ("torch", "load"), f"line {node.lineno}"
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
            assert isinstance(node.value, ast.Constant), f"line {node.lineno}"
            assert node.value.value is False, f"line {node.lineno}"
