"""The encoder of a producer and decoders distilled for its specialist, on tiny models a fine-tune apart."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from calibration.distill import Classroom, DistillSettings, Prompt, StudentDecoder, distill, lesson_of
from calibration.klt import KltSettings, fit_klt
from scd_core.capture import capture_all
from scd_core.codec import HELD_BACK, SINK_TOKENS, Encoder
from scd_core.errors import CorpusError
from scd_core.huggingface import LoadedModel
from tests.tiny import tiny_ids, tiny_model, tiny_tokenizer

PROMPTS = [Prompt(tiny_ids(100, seed), tiny_ids(6, 100 + seed)) for seed in range(12)]
KLT = KltSettings(step=0.3, tokens=800, packing_tokens=400)
SETTINGS = DistillSettings(steps=80, rank=None, rate=1e-2)


@pytest.fixture(scope="module")
def pair() -> tuple[LoadedModel, LoadedModel]:
    model = tiny_model("llama")
    tuned = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return LoadedModel.of(model, tiny_tokenizer()), LoadedModel.of(tuned, tiny_tokenizer())


@pytest.fixture(scope="module")
def encoder(pair: tuple[LoadedModel, LoadedModel]) -> Encoder:
    return fit_klt(pair[0], [p.prompt for p in PROMPTS], KLT)


def mean_kl(pair: tuple[LoadedModel, LoadedModel], encoder: Encoder, student: StudentDecoder) -> float:
    classroom = Classroom(*pair, encoder)
    unseen = [Prompt(tiny_ids(100, seed), tiny_ids(6, seed)) for seed in range(500, 506)]
    lessons = [lesson_of(p, SETTINGS, encoder.page_size, None) for p in unseen]
    with torch.no_grad():
        return sum(float(classroom.kl(lesson, student).mean()) for lesson in lessons if lesson) / len(lessons)


def test_klt_bases_diagonalise_the_producers_state(
    pair: tuple[LoadedModel, LoadedModel], encoder: Encoder
) -> None:
    """Guards the covariance (mean not subtracted, sinks left in): coefficients would correlate."""
    states = [capture_all(pair[0], p.prompt) for p in PROMPTS[:9]]
    values = torch.cat([s.content.values[1, SINK_TOKENS:] for s in states]).double()
    index = encoder.stream(1, "v")
    z = (values - encoder.means[index].double()) @ encoder.bases[index].double()
    covariance = torch.cov(z.T)
    off = covariance - covariance.diag().diag()
    assert off.abs().max() < 0.02 * covariance.diag().max()
    assert (covariance.diag().diff() < 0.02 * covariance.diag().max()).all(), "widest coefficients come first"


def test_native_first_layer_costs_no_columns(pair: tuple[LoadedModel, LoadedModel], encoder: Encoder) -> None:
    assert {s.layer for s in encoder.streams} == set(range(1, pair[0].layers))


def test_an_undistilled_student_hands_over_the_producers_state(
    pair: tuple[LoadedModel, LoadedModel], encoder: Encoder
) -> None:
    """The start of distillation: the quantised state, as near as half a step."""
    student = StudentDecoder(encoder, pair[1].layers, pair[1].kv_dim, replace(SETTINGS, rank=2))
    state = capture_all(pair[0], PROMPTS[0].prompt)
    keys, values = student(encoder.encode(state), PROMPTS[0].prompt, pair[1])
    for decoded, own in ((keys, state.content.keys), (values, state.content.values)):
        error = (decoded - own)[1:, SINK_TOKENS:]
        spread = own[1:, SINK_TOKENS:].std(1, keepdim=True)
        assert error.square().mean().sqrt() < KLT.step * spread.square().mean().sqrt() / 12**0.5 * 1.3


def test_distillation_lowers_kl_on_unseen_prompts(pair: tuple[LoadedModel, LoadedModel], encoder: Encoder) -> None:
    """Guards gradients that do not reach the maps, and a decoder that is not what was trained."""
    before = mean_kl(pair, encoder, StudentDecoder(encoder, pair[1].layers, pair[1].kv_dim, SETTINGS))
    many = [
        Prompt(tiny_ids(100, seed), tiny_ids(6, 100 + seed)) for seed in range(160)
    ]  # twelve are learnt by heart
    decoder, report = distill(*pair, encoder, many, SETTINGS)

    def decode(codes: torch.Tensor, ids: list[int], model: LoadedModel) -> tuple[torch.Tensor, torch.Tensor]:
        content = decoder.decode(codes, ids, model)
        return content.keys, content.values

    after = mean_kl(pair, encoder, decode)  # type: ignore[arg-type]
    assert after < 0.85 * before
    assert len(report["loss_curve"]) == SETTINGS.steps


def test_a_killed_run_ends_as_an_unbroken_one(
    pair: tuple[LoadedModel, LoadedModel], encoder: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards a restart that loses Adam's moments, the schedule, or its place in the corpus."""
    settings = replace(SETTINGS, steps=60, rank=4)
    whole, _ = distill(*pair, encoder, PROMPTS, settings)
    steps = 0
    original = Classroom.kl

    def killed(self: Classroom, *args: object) -> torch.Tensor:
        nonlocal steps
        steps += 1
        if steps > 55 * settings.batch:
            raise KeyboardInterrupt
        return original(self, *args)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Classroom, "kl", killed)
        with pytest.raises(KeyboardInterrupt):
            distill(*pair, encoder, PROMPTS, settings, tmp_path / "run.safetensors")
    resumed, report = distill(*pair, encoder, PROMPTS, settings, tmp_path / "run.safetensors")
    assert len(report["loss_curve"]) == settings.steps
    for name, tensor in whole.tensors().items():
        assert torch.allclose(tensor.float(), resumed.tensors()[name].float(), atol=1e-3), name


def test_a_checkpoint_of_other_settings_is_refused(
    pair: tuple[LoadedModel, LoadedModel], encoder: Encoder, tmp_path: Path
) -> None:
    settings = replace(SETTINGS, steps=50, rank=2)
    distill(*pair, encoder, PROMPTS[:2], settings, tmp_path / "run.safetensors")
    with pytest.raises(CorpusError, match="other settings"):
        distill(*pair, encoder, PROMPTS[:2], replace(settings, rate=0.1), tmp_path / "run.safetensors")


def test_lessons_leave_the_tail_and_the_answer_native() -> None:
    prompt = Prompt(tiny_ids(100), tiny_ids(6))
    lesson = lesson_of(prompt, SETTINGS, 32, None)
    assert lesson is not None
    assert lesson.coded == 64, f"96 would leave fewer than {HELD_BACK} tokens"
    assert lesson.ids == prompt.prompt + prompt.answer
    # the position before each answer token predicts it
    heavy = (lesson.weights == SETTINGS.answer_weight).nonzero().flatten() + lesson.coded
    assert heavy.tolist() == list(range(99, 105))


def test_cut_lessons_score_the_documents_own_next_tokens() -> None:
    prompt = Prompt(tiny_ids(400), [])
    lesson = lesson_of(prompt, SETTINGS, 32, random.Random(0))
    assert lesson is not None
    assert lesson.coded % 32 == 0
    assert lesson.ids == prompt.prompt[: lesson.coded + SETTINGS.window]


def test_prompts_shorter_than_a_page_are_refused_by_name(
    pair: tuple[LoadedModel, LoadedModel], encoder: Encoder
) -> None:
    with pytest.raises(CorpusError, match="shorter than one coded page"):
        distill(*pair, encoder, [Prompt(tiny_ids(20), [])], SETTINGS)
