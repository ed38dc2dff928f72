"""The paper's method end to end on tiny models: producer and specialist share a shape and not their weights."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from calibration.distill import Classroom, DistillSettings, Prompt, lesson_of
from calibration.moments import StateMoments
from calibration.paper import PaperSettings, fit_paper, gather
from scd_core.capture import capture_all
from scd_core.codec import SINK_TOKENS, Decoder, Encoder, PatchLayer, ReuseLayer
from scd_core.errors import CorpusError
from scd_core.huggingface import LoadedModel
from tests.tiny import tiny_ids, tiny_loaded, tiny_model, tiny_tokenizer

SETTINGS = PaperSettings(candidates=2, most_patches=2, profile_prefixes=2, aligner_width=16, aligner_steps=20)
PROMPTS = [Prompt(tiny_ids(90, seed), tiny_ids(6, 100 + seed)) for seed in range(8)]


@pytest.fixture(scope="module")
def pair() -> tuple[LoadedModel, LoadedModel]:
    """A producer, and a specialist a fine-tune away from it."""
    model = tiny_model("llama")
    tuned = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=generator)
    return LoadedModel.of(model, tiny_tokenizer()), LoadedModel.of(tuned, tiny_tokenizer())


def kl(
    producer: LoadedModel, specialist: LoadedModel, encoder: Encoder, decoder: Decoder, prompt: Prompt
) -> float:
    """Nats per token behind the decoded prefix of a prompt."""
    lesson = lesson_of(prompt, DistillSettings(), encoder.page_size, None)
    assert lesson is not None

    def decode(codes: torch.Tensor, ids: list[int], model: LoadedModel) -> tuple[torch.Tensor, torch.Tensor]:
        content = decoder.decode(codes, ids, model)
        return content.keys, content.values

    with torch.no_grad():
        return float(Classroom(producer, specialist, encoder).kl(lesson, decode).mean())


def test_moments_follow_both_models_and_leave_the_sinks_out(pair: tuple[LoadedModel, LoadedModel]) -> None:
    """Against the captured states themselves; guards x and y swapped, sinks kept, and rows of the wrong layer."""
    moments = StateMoments(*pair, hidden_layers=(2, 0))
    for prompt in PROMPTS[:3]:
        moments.update(*pair, prompt.prompt)
    states = [[capture_all(model, p.prompt, hidden_layers=(0, 2)) for p in PROMPTS[:3]] for model in pair]
    values = [torch.cat([s.content.values[1, SINK_TOKENS:] for s in side]).double() for side in states]
    hidden = [torch.cat([s.hidden[2][SINK_TOKENS:] for s in side]).double() for side in states]
    for (x, y), got in ((values, moments.of(1, "v")), (hidden, moments.of(2, "h"))):
        assert got.count == 3 * (90 - SINK_TOKENS)
        assert torch.allclose(got.mean_y, y.mean(0))
        assert torch.allclose(got.xy, (x - x.mean(0)).T @ (y - y.mean(0)) / got.count, atol=1e-8)


def test_a_killed_gathering_goes_on(pair: tuple[LoadedModel, LoadedModel], tmp_path: Path) -> None:
    """Sums of a resumed run equal those of one that was never stopped: no prompt twice, none left out."""
    prompts = [p.prompt for p in PROMPTS]
    gather(*pair, prompts[:3], (1,), 10_000, tmp_path)
    resumed = gather(*pair, prompts, (1,), 10_000, tmp_path)
    whole = gather(*pair, prompts, (1,), 10_000)
    assert resumed.prompts == whole.prompts == 8
    for kind, moments in whole.pairs.items():
        assert moments.count == resumed.pairs[kind].count
        assert all(torch.equal(s, resumed.pairs[kind].sums[name]) for name, s in moments.sums.items())


def test_foreign_moments_are_refused(pair: tuple[LoadedModel, LoadedModel], tmp_path: Path) -> None:
    """Moments of other layers have the right shape: going on from them would mix layers silently."""
    gather(*pair, [PROMPTS[0].prompt], (1,), 10_000, tmp_path)
    path = tmp_path / "moments.safetensors"
    with pytest.raises(CorpusError, match="other shapes or layers"):
        StateMoments(*pair, hidden_layers=(2,)).load(path)
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(CorpusError, match="delete it"):
        StateMoments(*pair, hidden_layers=(1,)).load(path)


def test_equal_models_at_full_rank_answer_as_natively(pair: tuple[LoadedModel, LoadedModel]) -> None:
    """The harness's oracle: nothing is lost but bfloat16's rounding of codes, reused or patched."""
    producer, _ = pair
    full = replace(SETTINGS, rank_k=999, rank_v=999, rank_h=999, patch=(), ridge=1e-9)
    for patch in ((), (1, 2)):
        encoder, decoder, report = fit_paper(producer, producer, PROMPTS, replace(full, patch=patch))
        assert report["ranks"] == {"k": 32, "v": 32, "h": 64}
        assert kl(producer, producer, encoder, decoder, PROMPTS[0]) < 1e-2


def test_mapping_beats_ranks_of_one(pair: tuple[LoadedModel, LoadedModel]) -> None:
    """Fitted maps that did not depend on the codes would do as well at rank 1."""
    good, poor = (fit_paper(*pair, PROMPTS, replace(SETTINGS, rank_k=r, rank_v=r, patch=())) for r in (24, 1))
    unseen = Prompt(tiny_ids(90, 77), tiny_ids(6, 78))
    assert kl(*pair, *good[:2], unseen) < 0.8 * kl(*pair, *poor[:2], unseen)


def test_profiled_patches_are_in_the_codec_and_in_the_report(pair: tuple[LoadedModel, LoadedModel]) -> None:
    """The codec sends what the report says, and a patched layer sends its hidden code only."""
    encoder, decoder, report = fit_paper(*pair, PROMPTS, SETTINGS)
    chosen = tuple(report["patch"])
    assert encoder.hidden_layers == chosen
    kinds = [PatchLayer if i in chosen else ReuseLayer for i in range(3)]
    assert [type(layer) for layer in decoder.layers] == kinds
    # kv_dim 32 and hidden 64: ranks 10, 16 and 32 by default
    assert report["bytes_per_token"] == 2 * (26 * (3 - len(chosen)) + 32 * len(chosen)) == 2 * encoder.columns
    assert [p["k"] for p in report["profile"]["curve"]] == [0, 1, 2]
    assert len(report["linear_gains"]) == 3
    assert len(report["aligners"]) == 2
    json.dumps(report)


def test_curve_is_what_the_codec_does(pair: tuple[LoadedModel, LoadedModel]) -> None:
    """The composed cache of the profile must be the final codec's cache: guards the wrong layers swapped in."""
    encoder, decoder, report = fit_paper(*pair, PROMPTS, replace(SETTINGS, profile_prefixes=1, most_patches=1))
    again = fit_paper(*pair, PROMPTS, replace(SETTINGS, profile_prefixes=1, most_patches=1))
    assert again[0].digest == encoder.digest
    point = next(p for p in report["profile"]["curve"] if sorted(p["layers"]) == report["patch"])
    weighted = []
    for prompt in PROMPTS:
        lesson = lesson_of(prompt, DistillSettings(), encoder.page_size, None)
        assert lesson is not None

        def decode(codes: torch.Tensor, ids: list[int], model: LoadedModel) -> tuple[torch.Tensor, torch.Tensor]:
            content = decoder.decode(codes, ids, model)
            return content.keys, content.values

        with torch.no_grad():
            each = Classroom(*pair, encoder).kl(lesson, decode)
        weighted.append(-float((each * lesson.weights).sum() / lesson.weights.sum()))
    assert min(abs(q - point["quality"]) for q in weighted) < 1e-4


def test_named_layers_are_patched_and_round_trip(pair: tuple[LoadedModel, LoadedModel]) -> None:
    """What is saved decodes as what was fitted."""
    encoder, decoder, report = fit_paper(*pair, PROMPTS, replace(SETTINGS, patch=(2, 0)))
    assert report["patch"] == [0, 2]
    assert "profile" not in report
    loaded = Encoder.from_tensors(json.loads(json.dumps(encoder.spec())), encoder.tensors())
    assert loaded.digest == encoder.digest
    again = Decoder.from_tensors(json.loads(json.dumps(decoder.spec())), decoder.tensors(), loaded)
    codes = encoder.encode(capture_all(pair[0], PROMPTS[0].prompt, hidden_layers=(0, 2)))
    first, second = (d.decode(codes, PROMPTS[0].prompt, pair[1]) for d in (decoder, again))
    assert torch.equal(first.keys, second.keys)
    assert torch.equal(first.values, second.values)


def test_a_killed_run_keeps_its_aligners(pair: tuple[LoadedModel, LoadedModel], tmp_path: Path) -> None:
    """The second run reads them: it gives what was written, here a bias that no training would find."""
    settings = replace(SETTINGS, patch=(1,))
    _, first, _ = fit_paper(*pair, PROMPTS, settings, tmp_path)
    (file,) = tmp_path.glob("paper-*/aligner.1.safetensors")
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    tensors["b2"] += 100
    save_file(tensors, file, {"errors": "{}"})
    _, second, _ = fit_paper(*pair, PROMPTS, settings, tmp_path)
    assert torch.equal(second.layers[1].b2, first.layers[1].b2 + 100)
    file.write_bytes(b"torn")
    with pytest.raises(CorpusError, match="delete it"):
        fit_paper(*pair, PROMPTS, settings, tmp_path)


def test_other_inputs_start_afresh(pair: tuple[LoadedModel, LoadedModel], tmp_path: Path) -> None:
    """A run with other prompts or settings must not go on from this one's moments."""
    reuse = SETTINGS.without_patches()
    fit_paper(*pair, PROMPTS[:4], reuse, tmp_path)
    fit_paper(*pair, PROMPTS[:5], reuse, tmp_path)
    fit_paper(*pair, PROMPTS[:4], replace(reuse, ridge=0.1), tmp_path)
    assert len(list(tmp_path.glob("paper-*"))) == 3


def test_too_short_prompts_and_wrong_settings_are_named(pair: tuple[LoadedModel, LoadedModel]) -> None:
    """Each says what is wrong instead of failing inside a solver."""
    with pytest.raises(CorpusError, match="coded page"):
        fit_paper(*pair, [Prompt(tiny_ids(20), [])], SETTINGS)
    with pytest.raises(CorpusError, match="sinks"):
        fit_paper(*pair, [Prompt(tiny_ids(3), [])], SETTINGS.without_patches())
    with pytest.raises(ValueError, match="patch layers"):
        fit_paper(*pair, PROMPTS, replace(SETTINGS, patch=(3,)))
    with pytest.raises(ValueError, match="positive"):
        replace(SETTINGS, rank_k=0)


def test_a_family_with_qk_norm_and_another_rope() -> None:
    """Keys are coded de-rotated and after qk-norm: another theta in the specialist must cost nothing."""
    producer = tiny_loaded("qwen3")
    rope = {"rope_type": "default", "rope_theta": 500.0}
    specialist = tiny_loaded("qwen3", rope_parameters=rope)
    settings = replace(SETTINGS, rank_k=999, rank_v=999, rank_h=999, patch=(0,), ridge=1e-9)
    encoder, decoder, _ = fit_paper(producer, specialist, PROMPTS, settings)
    # layer 0 is patched: equal embeddings give equal hidden inputs, whatever the rope
    state = capture_all(producer, PROMPTS[0].prompt, hidden_layers=(0,))
    mine = capture_all(specialist, PROMPTS[0].prompt).content
    decoded = decoder.decode(encoder.encode(state), PROMPTS[0].prompt, specialist)
    error = (decoded.keys[0] - mine.keys[0])[SINK_TOKENS:]
    assert error.abs().max() < 0.05 * mine.keys[0].abs().max()
