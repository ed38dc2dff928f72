"""``scd serve``, ``scd register`` and ``scd specialists``: the commands that have to do with a pool."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from scd_core.errors import PoolError
from scd_core.home import registry_root

Registry = Annotated[
    Path | None,
    typer.Option(help="Folder of calibrated specialists.", show_default="$SCD_HOME/registry", file_okay=False),
]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def serve(
    registry: Registry = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65535)] = 8000,
    transport: Annotated[str, typer.Option(help="How codes move: inline, object_store or nixl.")] = "object_store",
    address: Annotated[str | None, typer.Option(help="A running Ray cluster's, such as auto.")] = None,
    cpus: Annotated[float, typer.Option(help="Logical CPUs that each model reserves.", min=0)] = 0.1,
    gpus: Annotated[float, typer.Option(help="GPUs that each model reserves.", min=0)] = 0.0,
    cache_tokens: Annotated[int, typer.Option(help="Capacity of a specialist's cache.", min=64)] = 32768,
    deadline: Annotated[float, typer.Option(help="Seconds to wait for codes before prefilling.", min=0)] = 30.0,
) -> None:
    """Serve every specialist of a registry over HTTP, until interrupted."""
    from app.serve import running_pool, wait_for_a_signal
    from deployments.config import PoolSettings, SpecialistSettings

    root = _with_demo(registry)
    try:
        specialist = SpecialistSettings(cache_tokens=cache_tokens, deadline_s=deadline)
        settings = PoolSettings(str(root), transport, cpus, gpus, specialist=specialist)
    except ValueError as error:
        raise PoolError(str(error)) from error
    with running_pool(settings, host, port, _say, address) as standings:
        serving = [s.name for s in standings if s.serves]
        _say(f"serving {', '.join(serving) or 'nothing yet'} on http://{host}:{port} (Ctrl-C stops)")
        wait_for_a_signal()
        _say("stopping")


def register(
    specialist: Annotated[
        str, typer.Argument(help="Name in the registry, or an artefact's folder to copy into it.")
    ],
    registry: Registry = None,
) -> None:
    """Check an artefact, put it into the registry, and have a running pool serve it."""
    from app.client import running
    from scd_core.registry import Registry as Artefacts

    root = (registry or registry_root()).resolve()
    folder = Path(specialist)
    if (folder / "manifest.json").is_file():
        # an artefact lies in a registry: its encoder lies there, too
        source = Artefacts(folder.resolve().parents[1])
        artefact = source.load_specialist(folder.resolve().name)
        Artefacts(root).save_specialist(artefact)
    else:
        artefact = Artefacts(root).load_specialist(specialist)
    _say(f"{artefact.name}: in {root}")
    found = running(str(root))
    if found is None:
        _say("no pool serves this registry here; scd serve will")
        return
    client, note = found
    with client:
        standing = next(row for row in client.reconcile(note.token, artefact.name) if row["name"] == artefact.name)
    if standing["status"] != "RUNNING":
        raise PoolError(f"{artefact.name} is {standing['status']}: {standing['message']}")
    _say(f"{artefact.name}: served on {note.url}")


def specialists(registry: Registry = None) -> None:
    """List the specialists of a registry, what was measured of them, and how they stand in a running pool."""
    from app.client import running
    from scd_core.errors import SCDError
    from scd_core.registry import Registry as Artefacts

    root = _with_demo(registry)
    found = running(str(root))
    standings = {}
    if found is not None:
        with found[0] as client:
            standings = {row["name"]: row for row in client.standings()}
    print(f"{'name':24} {'encoder':10} {'of raw':>7} {'KL':>8}  status")
    for name in Artefacts(root).list():
        row = standings.get(name, {"status": "not served", "message": ""})
        try:
            artefact = Artefacts(root).load_specialist(name)
        except SCDError as error:
            print(f"{name:24} {'':10} {'':>7} {'':>8}  refused: {type(error).__name__}: {error}")
            continue
        measured = artefact.report.get("held_out", {})
        ratio, kl = (measured.get(key) for key in ("bytes_ratio", "kl_mean"))
        numbers = [f"{x:.3f}" if isinstance(x, float) else "-" for x in (ratio, kl)]
        said = f"{row['status'].lower()} {row['message']}".strip()
        print(f"{name:24} {artefact.encoder.digest[:10]} {numbers[0]:>7} {numbers[1]:>8}  {said}")


def _with_demo(registry: Path | None) -> Path:
    """The registry; the default one has the demo's specialists."""
    if registry is None:
        from calibration.demo.publish import publish_demo
        from scd_core.registry import Registry as Artefacts

        publish_demo(Artefacts(registry_root()))
    return (registry or registry_root()).resolve()


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (serve, register, specialists):
        app.command()(command)
