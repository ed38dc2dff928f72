"""The command line, ``scd``.

Convention: a command's work is imported inside it, so that ``scd --help`` answers at once (torch, transformers
and Ray together take some ten seconds). A named error of ours is one line on standard error, never a traceback.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from scd_core.errors import SCDError
from scd_core.home import registry_root

app = typer.Typer(
    name="scd",
    help="Semantic Cache Distillation: one producer's prefill, compact codes, many fine-tuned specialists.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Registry = Annotated[
    Path | None,
    typer.Option(help="Folder of calibrated specialists.", show_default="$SCD_HOME/registry", file_okay=False),
]


@app.command()
def demo() -> None:
    """Serve the two shipped specialists on this machine and ask both about one document."""
    from app.demo import run_demo

    run_demo()


@app.command()
def base() -> None:
    """Fetch the demo's base model if need be, and print the folder it lies in."""
    from calibration.demo.base import obtain_base

    print(obtain_base())


@app.command()
def evaluate(
    name: Annotated[str, typer.Argument(help="Specialist, as the registry names it.")],
    questions: Annotated[
        Path | None, typer.Option(help="JSON list of {context, question, answer}.", exists=True, dir_okay=False)
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="Text file to measure perplexity on.", exists=True, dir_okay=False)
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Questions to ask at most, drawn by the seed.", min=1)] = None,
    out: Annotated[Path, typer.Option(help="Folder for the table and the plots.", file_okay=False)] = Path(
        "results"
    ),
    registry: Registry = None,
    seed: Annotated[int, typer.Option(help="Seed of the choice of questions.")] = 0,
) -> None:
    """Measure a calibrated specialist against every baseline, and save the table."""
    from calibration.evaluate import evaluate as measure

    measure(name, registry or registry_root(), questions, text, limit, out, seed)


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    except SCDError as error:
        print(f"scd: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
