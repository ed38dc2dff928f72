"""The command line, ``scd``.

Convention: a command's work is imported inside it, so that ``scd --help`` answers at once (torch, transformers
and Ray together take some ten seconds). A named error of ours is one line on standard error, never a traceback.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from app.pool_commands import add_to
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
def calibrate(
    producer: Annotated[str, typer.Option(help="Base model: folder, hub id, or demo:base.")],
    specialist: Annotated[str, typer.Option(help="Its fine-tune: folder, peft folder, hub id, or demo:NAME.")],
    corpus: Annotated[str, typer.Option(help="Text, JSONL or questions file, or a Hugging Face dataset id.")],
    out: Annotated[
        Path | None,
        typer.Option(help="Registry to publish in.", show_default="$SCD_HOME/registry", file_okay=False),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the specialist.", show_default="its folder's")] = None,
    method: Annotated[str, typer.Option(help="distilled, paper or paper-reuse.")] = "distilled",
    steps: Annotated[int | None, typer.Option(help="Distillation steps.", min=1)] = None,
    step: Annotated[float | None, typer.Option(help="Quantiser's step, in standard deviations.")] = None,
    answer_weight: Annotated[float | None, typer.Option(help="Weight of an answer's tokens in the loss.")] = None,
    continuation: Annotated[
        float | None, typer.Option(help="Share of prefixes cut short, to go on reading.")
    ] = None,
    decoder_rank: Annotated[int | None, typer.Option(help="Rank of the learned maps; 0: full.", min=0)] = None,
    rank_k: Annotated[int | None, typer.Option(help="Paper: rank of keys.", min=1)] = None,
    rank_v: Annotated[int | None, typer.Option(help="Paper: rank of values.", min=1)] = None,
    rank_h: Annotated[int | None, typer.Option(help="Paper: rank of hidden inputs.", min=1)] = None,
    patch: Annotated[str, typer.Option(help="Paper: 'auto', or layers such as 3,17.")] = "auto",
    max_tokens: Annotated[int, typer.Option(help="Longest prompt; longer documents are cut.", min=64)] = 1024,
    held_out: Annotated[float, typer.Option(help="Share of the documents to measure on.")] = 0.125,
    seed: Annotated[int, typer.Option(help="Seed of every choice.")] = 0,
    base: Annotated[str | None, typer.Option(help="Base of a peft specialist.", show_default="producer")] = None,
    start_from: Annotated[str | None, typer.Option(help="Specialist whose decoder to begin from.")] = None,
    ray: Annotated[str | None, typer.Option(help="Run as a job on the Ray cluster with this dashboard.")] = None,
    gpus: Annotated[float, typer.Option(help="GPUs of that job.", min=0)] = 0,
) -> None:
    """Fit a codec to a pair of models, measure it on held-out documents, and publish it.

    A run that was killed goes on where it stopped when it is started again with the same options.
    """
    if ray is not None:
        from calibration.job import run_as_job

        at = sys.argv.index("calibrate") + 1
        arguments = without_option(sys.argv[at:], "--ray", "--gpus")
        if not run_as_job(ray, arguments, lambda text: print(text, end="", flush=True), gpus):
            raise typer.Exit(1)
        return
    from calibration.options import settings_of
    from calibration.run import calibrate_pair

    settings = settings_of(
        method=method,
        steps=steps,
        step=step,
        answer_weight=answer_weight,
        continuation=continuation,
        decoder_rank=decoder_rank,
        ranks=(rank_k, rank_v, rank_h),
        patch=patch,
        max_tokens=max_tokens,
        held_out=held_out,
        seed=seed,
    )
    calibrate_pair(name, producer, specialist, corpus, out or registry_root(), settings, base, start_from)


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
    windows: Annotated[int, typer.Option(help="Windows of the text at most.", min=1)] = 40,
    base: Annotated[str | None, typer.Option(help="Base of a peft specialist.", show_default="producer")] = None,
) -> None:
    """Measure a calibrated specialist against every baseline, and save the table."""
    from calibration.demo.publish import publish_demo
    from calibration.evaluate import evaluate as measure
    from scd_core.registry import Registry as Artefacts

    if registry is None:
        publish_demo(Artefacts(registry_root()))
    measure(name, registry or registry_root(), questions, text, limit, out, seed, windows=windows, base=base)


def without_option(arguments: list[str], *names: str) -> list[str]:
    """Command-line arguments without the named options and their values."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if skip:
            skip = False
        elif argument in names:
            skip = True
        elif argument.partition("=")[0] not in names:
            kept.append(argument)
    return kept


add_to(app)


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    except SCDError as error:
        print(f"scd: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
