"""Where things lie on this machine: one folder, ``$SCD_HOME``, by default ``~/.cache/scd``."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """The folder under which models, artefacts and results are kept."""
    return Path(os.environ.get("SCD_HOME") or Path.home() / ".cache" / "scd").expanduser()


def registry_root() -> Path:
    """The default registry's folder."""
    return home() / "registry"
