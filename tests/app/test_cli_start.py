"""How ``scd`` starts and how it fails, as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_help_imports_nothing_heavy() -> None:
    """One import of torch at the head of a file, and ``scd --help`` takes ten seconds."""
    code = (
        "import sys\n"
        "from app.cli import app\n"
        "try: app(['--help'])\n"
        "except SystemExit as end: assert end.code in (0, None), end.code\n"
        "print(sorted({'torch', 'transformers', 'ray', 'fastapi', 'matplotlib', 'numpy'} & set(sys.modules)))"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    assert "evaluate" in done.stdout


def test_a_named_error_is_one_line(tmp_path: Path) -> None:
    done = python("-m", "app.cli", "base", SCD_BASE=str(tmp_path / "nowhere"))
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("scd: ModelUnavailableError: SCD_BASE=")


def test_base_prints_the_folder_and_nothing_else(tmp_path: Path) -> None:
    """``--producer "$(scd base)"`` must not catch a progress line."""
    (tmp_path / "config.json").write_text("{}")
    done = python("-m", "app.cli", "base", SCD_BASE=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}\n")
