"""The README's commands are run, or say why not.

Every block of commands stands under a comment: ``run: test`` is run here; ``run: ci`` is run by .ci/run, line by
line; ``run: server`` is run here against ``scd serve`` (slow); ``not run: REASON`` is only read: its ``scd`` and
``make`` commands and their options must exist.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import httpx
import pytest
import typer

from app.cli import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:8000"
BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]+?) -->\n)?```(?P<language>bash|python|sh|console)\n(?P<body>.*?)^```$", re.M | re.S
)


@dataclass(frozen=True)
class Block:
    """One block of commands and the mark above it."""

    mark: str
    language: str
    body: str

    def lines(self) -> list[str]:
        return [line for line in self.body.splitlines() if line.strip()]


def blocks(text: str) -> list[Block]:
    return [Block(m["mark"] or "", m["language"], m["body"]) for m in BLOCK.finditer(text)]


def marked(mark: str) -> list[Block]:
    return [block for block in blocks(README) if block.mark == mark]


def commands(program: str) -> list[str]:
    return [line for block in blocks(README) for line in block.lines() if line.startswith(program + " ")]


def run(block: Block, home: Path) -> subprocess.CompletedProcess[str]:
    """Runs a block as it stands, with this environment's programs first."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    start = [sys.executable, "-c"] if block.language == "python" else ["bash", "-euo", "pipefail", "-c"]
    return subprocess.run(
        [*start, block.body],
        cwd=ROOT,
        env={**os.environ, "PATH": path, "SCD_HOME": str(home), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_every_block_says_whether_it_is_run() -> None:
    """A block without a mark would be neither run nor excused."""
    assert len(blocks(README)) == len(re.findall(r"^```(?:bash|python|sh|console)$", README, re.M))
    for block in blocks(README):
        assert re.fullmatch(r"run: (test|ci|server)|not run: \S.*", block.mark), block.body


def test_a_block_without_its_mark_is_found() -> None:
    """Guards the parser: an unmarked block comes out with an empty mark instead of vanishing."""
    text = "<!-- run: ci -->\n```bash\na\n```\n\ntext\n\n```bash\nb\n```\n"
    assert [(b.mark, b.body) for b in blocks(text)] == [("run: ci", "a\n"), ("", "b\n")]


def test_the_two_commands_come_first_and_ci_runs_them() -> None:
    script = [line.strip().removeprefix("time ") for line in (ROOT / ".ci" / "run").read_text().splitlines()]
    first = marked("run: ci")[0]
    assert blocks(README)[0] == first
    assert first.lines() == ["make demo", "make test"]
    for block in marked("run: ci"):
        for line in block.lines():
            assert line in script, f"README says .ci/run runs {line!r}"


@pytest.mark.parametrize("block", marked("run: test"), ids=lambda b: b.lines()[0])
def test_block_runs(block: Block, tmp_path: Path) -> None:
    done = run(block, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("line", commands("scd"))
def test_scd_command_exists_with_these_options(line: str) -> None:
    """An option renamed in the code, or one that never was, fails here rather than at the reader's."""
    _, name, *words = shlex.split(line)
    if name.startswith("-"):
        return
    group = typer.main.get_command(app)
    assert name in group.commands, f"scd has no command {name}"  # type: ignore[attr-defined]
    command: click.Command = group.commands[name]  # type: ignore[attr-defined]
    known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    assert {word.split("=")[0] for word in words if word.startswith("-")} <= known


@pytest.mark.parametrize("line", commands("make"))
def test_make_target_exists(line: str) -> None:
    target = line.split()[1]
    assert re.search(rf"^{re.escape(target)}:", (ROOT / "Makefile").read_text(), re.M)


def test_local_links_lead_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """``scd serve`` as the README starts it, on a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("serve") / "log"
    scd = Path(sys.executable).parent / "scd"
    with log.open("w") as out:
        process = subprocess.Popen([scd, "serve", "--port", str(port)], cwd=ROOT, stdout=out, stderr=out)
    address = f"http://127.0.0.1:{port}"
    try:
        while not _healthy(address):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
                pytest.fail(f"scd serve ended with {process.returncode}:\n{log.read_text()[-3000:]}")
        yield address
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _healthy(address: str) -> bool:
    try:
        return httpx.get(f"{address}/healthz", trust_env=False, timeout=10).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("block", marked("run: server"), ids=lambda b: b.language)
def test_block_runs_against_a_server(block: Block, server: str, tmp_path: Path) -> None:
    done = run(Block(block.mark, block.language, block.body.replace(ADDRESS, server)), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "error" not in done.stdout
    assert done.stdout.strip()
