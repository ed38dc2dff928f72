"""Metrics against examples worked out by hand."""

import math

import pytest
import torch

from calibration.metrics import (
    agreement_per_position,
    answer_exact,
    answer_f1,
    bootstrap_interval,
    cmrc_exact,
    cmrc_f1,
    cmrc_segments,
    kl_per_position,
    longest_common_run,
    nll_per_position,
    perplexity,
    squad_exact,
    squad_f1,
    squad_normalise,
)


def test_squad_normalisation_removes_case_punctuation_and_articles():
    assert squad_normalise("The  Eiffel-Tower, a tower!") == "eiffeltower tower"
    # articles are words, not letters: "theatre" and "another" keep theirs
    assert squad_normalise("an theatre another") == "theatre another"


@pytest.mark.parametrize(
    ("prediction", "reference", "expected"),
    [
        # 2 shared words of 3 predicted and 4 wanted: P 2/3, R 1/2, F1 4/7
        ("north central Ohio", "the North Central hills region", 4 / 7),
        ("Mississippi", "mississippi.", 1.0),
        ("Alabama", "Mississippi", 0.0),
        # a word predicted twice counts once: P 1/2, R 1
        ("Paris Paris", "Paris", 2 / 3),
        ("", "Paris", 0.0),
        # both empty once normalised (SQuAD 2.0)
        ("the", "a", 1.0),
    ],
)
def test_squad_f1_by_hand(prediction, reference, expected):
    assert squad_f1(prediction, reference) == pytest.approx(expected)


def test_squad_exact_ignores_only_what_normalisation_removes():
    assert squad_exact("The Paris.", "paris") == 1
    assert squad_exact("Paris France", "Paris") == 0


def test_cmrc_segments_split_chinese_by_character_and_the_rest_by_word():
    assert cmrc_segments("光荣和ω-Force 2.5版") == ["光", "荣", "和", "ωforce", "2.5", "版"]
    assert cmrc_segments("《跑跑》，2006年！") == ["跑", "跑", "2006", "年"]


def test_the_common_run_is_contiguous():
    """Guards against a subsequence (which would be 4 here) in the place of a substring."""
    assert longest_common_run("abxcd", "abycd") == 2


@pytest.mark.parametrize(
    ("prediction", "reference", "expected"),
    [
        # segments 任天堂游戏谜之村雨城 (10) against 村雨城 (3), run 3: P 3/10, R 1, F1 6/13
        ("任天堂游戏谜之村雨城", "村雨城", 6 / 13),
        # bags of characters are equal, the longest run is 2 of 4: P = R = 1/2
        ("京北大学", "大学京北", 0.5),
        ("北京。", "《北京》", 1.0),
        ("上海", "北京", 0.0),
        ("", "北京", 0.0),
    ],
)
def test_cmrc_f1_by_hand(prediction, reference, expected):
    assert cmrc_f1(prediction, reference) == pytest.approx(expected)


def test_cmrc_exact_ignores_case_and_its_own_punctuation():
    assert cmrc_exact("NBA，总冠军", "nba总冠军") == 1
    assert cmrc_exact("总冠军", "冠军") == 0


def test_the_language_of_the_reference_chooses_and_the_best_reference_counts():
    """ "大学京北" is one SQuAD word (F1 0 against the other order), and half right by CMRC2018."""
    assert answer_f1("京北大学", ["大学京北"]) == 0.5
    assert answer_f1("the tower", ["Paris", "Tower"]) == 1
    assert answer_exact("tower", ["Paris", "The Tower"]) == 1


def test_kl_by_hand():
    # p = (3/4, 1/4), q = (1/2, 1/2): KL = 3/4 ln 3/2 + 1/4 ln 1/2
    p = torch.tensor([[0.75, 0.25], [0.5, 0.5]]).log()
    q = torch.tensor([[0.5, 0.5], [0.5, 0.5]]).log() + 7.0
    expected = [0.75 * math.log(1.5) + 0.25 * math.log(0.5), 0.0]
    assert kl_per_position(p, q).tolist() == pytest.approx(expected, abs=1e-6)
    # the direction matters: KL(q || p) = 1/2 ln 2/3 + 1/2 ln 2
    assert kl_per_position(q, p)[0].item() == pytest.approx(0.5 * math.log(4 / 3), abs=1e-6)


def test_agreement_compares_the_first_choice_only():
    teacher = torch.tensor([[1.0, 2.0, 0.0], [3.0, 2.0, 0.0]])
    student = torch.tensor([[0.0, 0.1, 0.0], [1.0, 2.0, 0.0]])
    assert agreement_per_position(teacher, student).tolist() == [1, 0]


def test_perplexity_by_hand():
    logits = torch.tensor([[0.25, 0.75], [0.5, 0.5]]).log()
    nll = nll_per_position(logits, [0, 1])
    assert nll.tolist() == pytest.approx([math.log(4), math.log(2)], abs=1e-6)
    assert perplexity(nll.tolist()) == pytest.approx(8**0.5)  # the geometric mean of 4 and 2
    assert perplexity([1e4]) == math.inf


def test_bootstrap_holds_the_mean_and_narrows_with_more_values():
    values = [0.0, 1.0] * 20
    low, high = bootstrap_interval(values, seed=0)
    assert low < 0.5 < high
    wide = bootstrap_interval(values[:10], seed=0)
    assert high - low < wide[1] - wide[0]
    assert bootstrap_interval([0.7] * 5, seed=0) == pytest.approx((0.7, 0.7))
