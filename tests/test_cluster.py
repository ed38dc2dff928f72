"""cluster.yaml against the rules of the Ray release it asks for."""

from __future__ import annotations

import copy
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

ROOT = Path(__file__).parents[1]


@pytest.fixture
def config() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "cluster.yaml").read_text(encoding="utf-8"))


def test_ray_accepts_it(config: dict[str, Any]) -> None:
    """`ray up` runs the same two steps; a misspelt key or a type out of place fails in the second."""
    validate_config(prepare_config(config))


def test_ray_would_refuse_a_misspelt_key(config: dict[str, Any]) -> None:
    """Guards the test above: the schema does look inside node types."""
    broken = copy.deepcopy(config)
    broken["available_node_types"]["producer"]["max_worker"] = 1
    with pytest.raises(Exception, match="max_worker"):
        validate_config(prepare_config(broken))


def test_images_bring_the_ray_that_is_installed(config: dict[str, Any]) -> None:
    """Nodes of another Ray release refuse to join: the tag must follow pyproject.toml."""
    for role in ("head_image", "worker_image"):
        assert config["docker"][role].split(":")[1].startswith(f"{version('ray')}-py311")


def test_roles_are_apart(config: dict[str, Any]) -> None:
    """The head is never scheduled a model; producer and specialists each have GPU nodes of their own."""
    types = config["available_node_types"]
    assert "GPU" not in types[config["head_node_type"]]["resources"]
    assert types["producer"]["resources"]["GPU"] == types["specialist"]["resources"]["GPU"] == 1


def test_what_is_copied_is_what_is_installed(config: dict[str, Any]) -> None:
    """A renamed mount must not leave the setup command installing another folder."""
    (mount,) = config["file_mounts"]
    assert config["file_mounts"][mount] == "."
    assert any(f"cd {mount} " in command for command in config["setup_commands"])
