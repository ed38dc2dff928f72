"""Choosing patch layers, on qualities whose best choice is known."""

from __future__ import annotations

import json

import pytest

from calibration.profile import profile_patches

REUSED, PATCHED = 100.0, 130.0


def size(layers: frozenset[int]) -> float:
    return 10 * REUSED + len(layers) * (PATCHED - REUSED)


def additive(gains: dict[int, float]):
    return lambda layers: -5 + sum(gains[layer] for layer in layers)


def test_the_curve_peaks_where_quality_per_byte_does() -> None:
    """Against brute force over k; guards dividing by the extra bytes, which always chooses one layer."""
    gains = {layer: 1 / (1 + layer) ** 2 for layer in range(10)}
    profile = profile_patches(additive(gains), size, gains, most=10)
    assert profile.ranking == tuple(range(10))
    worth = [sum(list(gains.values())[:k]) / size(frozenset(range(k))) for k in range(11)]
    best = worth.index(max(worth))
    assert 1 < best < 10
    assert profile.chosen == tuple(range(best))
    assert [p.gain_per_byte for p in profile.curve] == pytest.approx(worth)


def test_layers_that_harm_are_never_taken() -> None:
    """Restoring a wrong layer made a real pair worse; guards a ranking by absolute effect."""
    gains = {0: 0.5, 1: -3.0, 2: 0.4, 3: -0.1}
    profile = profile_patches(additive(gains), size, gains, most=4)
    assert profile.chosen == (0, 2)
    assert profile.ranking[-1] == 1
    assert profile.gains == pytest.approx(gains)


def test_no_gain_means_no_patch() -> None:
    """k = 0 is a choice too."""
    assert profile_patches(additive({0: -0.1, 1: 0.0}), size, (0, 1), most=2).chosen == ()


def test_the_curve_is_measured_and_not_added_up() -> None:
    """Two layers that repair the same fault: together they gain no more than one; a sum would take both."""

    def quality(layers: frozenset[int]) -> float:
        return float(bool(layers & {3, 7})) + 0.2 * (5 in layers)

    profile = profile_patches(quality, size, (3, 5, 7), most=3)
    assert profile.ranking == (3, 7, 5)
    assert profile.chosen == (3, 5, 7)
    assert [p.quality for p in profile.curve] == pytest.approx([0, 1, 1, 1.2])


def test_ranking_counts_bytes() -> None:
    """A gain that costs ten times the bytes ranks behind; guards ranking by quality alone."""
    costs = {0: 300.0, 1: 30.0}

    def uneven(layers: frozenset[int]) -> float:
        return 1000 + sum(costs[layer] for layer in layers)

    assert profile_patches(additive({0: 1.0, 1: 0.5}), uneven, (0, 1), most=2).ranking == (1, 0)


def test_a_patch_that_costs_no_bytes_ranks_by_its_gain() -> None:
    """A narrow hidden code may be smaller than the two it replaces: no division by zero, no reversed order."""
    profile = profile_patches(additive({0: 0.1, 1: 0.3, 2: -0.2}), lambda s: 1000.0 - 5 * len(s), range(3), most=3)
    assert profile.ranking == (1, 0, 2)
    assert profile.chosen == (0, 1)


def test_each_configuration_is_measured_once_and_the_budget_holds() -> None:
    """A configuration is a forward per prefix: guards measuring the ranking's first layer again on the curve."""
    seen: list[frozenset[int]] = []

    def quality(layers: frozenset[int]) -> float:
        seen.append(layers)
        return float(len(layers))

    profile = profile_patches(quality, size, range(6), most=3)
    assert len(seen) == len(set(seen)) == 1 + 6 + 2
    assert len(profile.chosen) == 3
    assert json.loads(json.dumps(profile.report()))["k"] == 3
