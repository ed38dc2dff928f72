"""The whole evaluation on a tiny pair whose figures are known: equal models through known codecs."""

import csv
import json
import math
import shutil

import pytest
import torch

from calibration.corpus import Example, write_questions
from calibration.evaluate import BEHIND, PREFIX, evaluate
from calibration.report import COLUMNS, METHODS
from scd_core.codec import identity_codec, zero_codec
from scd_core.errors import ArtefactDigestError, ArtefactError, CorpusError, FingerprintError
from scd_core.huggingface import load_model
from scd_core.registry import Registry, SpecialistArtefact
from tests.tiny import tiny_folder

WORDS = (
    "the a river mountain city was in of and north south old new built by people year water road".split()  # noqa: SIM905
)


def prose(seed: int, words: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (words,), generator=generator).tolist())


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def registry(source, tmp_path_factory):
    """``same``: identity codec; ``same--paper``: zeros; no ``same--paper-reuse``."""
    model = load_model(source, dtype=torch.float32)
    registry = Registry(tmp_path_factory.mktemp("registry"))
    seen = [Example(prose(0, 60)).fingerprint]
    for name, codec in (("same", identity_codec), ("same--paper", zero_codec)):
        encoder, decoder = codec(model.layers, model.kv_dim)
        registry.save_specialist(
            SpecialistArtefact(
                name=name,
                producer_source=str(source),
                specialist_source=str(source),
                producer=model.signature,
                specialist=model.signature,
                encoder=encoder,
                decoder=decoder,
                provenance={"seen": seen},
                report={},
            )
        )
    return registry


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    """Six documents: calibration saw the first, and the last is too short for a coded page."""
    path = tmp_path_factory.mktemp("data") / "questions.json"
    examples = [Example(prose(i, 60), f"where is {WORDS[i]} ?", "river") for i in range(5)]
    write_questions(path, [*examples, Example("old", "new ?", "road")])
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(f" = Title {i} = \n\n{prose(100 + i, 110)}\n\n" for i in range(2)))
    return path


@pytest.fixture(scope="module")
def run(registry, questions, text, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "deep" / "folder"
    rows = evaluate("same", registry, questions, text, None, out, seed=3, windows=2, command="scd evaluate same")
    return out, {row.method: row for row in rows}


def read_lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_table_holds_every_method_that_can_be_measured_in_order(run):
    out, rows = run
    assert list(rows) == [m for m in METHODS if m != "scd_paper_reuse"]
    with (out / "table.csv").open() as file:
        table = list(csv.DictReader(file))
    assert tuple(table[0]) == COLUMNS
    assert [row["method"] for row in table] == list(rows)
    assert all(value for row in table for value in row.values())
    assert (out / "table.md").read_text().count("\n| ") == len(rows)
    assert (out / "pareto.png").stat().st_size > 10_000


def test_the_identity_codec_is_the_oracle(run):
    _, rows = run
    oracle, scd = rows["oracle"], rows["scd"]
    assert (oracle.kl, oracle.agreement, oracle.bytes_per_token) == (0, 1, 0)
    assert scd.kl < 1e-4  # nats
    assert (scd.agreement, scd.f1) == (1, oracle.f1)
    assert scd.ppl == pytest.approx(oracle.ppl, rel=1e-3)


def test_the_zero_codec_is_not(run):
    _, rows = run
    assert rows["scd_paper"].kl > 100 * max(rows["scd"].kl, 1e-6)
    assert rows["scd_paper"].ppl != pytest.approx(rows["oracle"].ppl, rel=1e-3)


def test_bytes_are_those_on_the_wire(run):
    """float32 codes are twice raw bfloat16, and the pages' headers on top; raw is exactly raw."""
    _, rows = run
    assert rows["raw"].bytes_ratio == rows["raw_rerotated"].bytes_ratio == 1
    assert rows["int4"].bytes_ratio == pytest.approx(5 / 16)
    assert 2 < rows["scd"].bytes_ratio < 2.5


def test_perplexity_is_the_models_own(run, source, text):
    """The oracle's figure, recomputed from the model and the text without the harness."""
    _, rows = run
    model = load_model(source, dtype=torch.float32)
    nll = []
    for document in text.read_text().split(" = Title ")[1:]:
        ids = model.tokenizer(document.split("=", 1)[1].strip())["input_ids"]
        for start in range(0, len(ids) - PREFIX - BEHIND, PREFIX + BEHIND + 1):
            window = torch.tensor([ids[start : start + PREFIX + BEHIND + 1]])
            with torch.no_grad():
                logits = model.model(window[:, :-1]).logits[0, PREFIX:]
            nll.append(torch.nn.functional.cross_entropy(logits, window[0, PREFIX + 1 :]).item())
    assert len(nll) == rows["oracle"].spread["windows"] == 2
    assert rows["oracle"].ppl == pytest.approx(math.exp(sum(nll) / len(nll)), rel=1e-4)


def test_what_calibration_saw_and_what_holds_no_page_is_left_out_and_said(run, questions):
    out, rows = run
    assert rows["oracle"].spread["questions"] == 4
    table = (out / "table.md").read_text()
    assert "left out 1 question(s) about documents that calibration saw" in table
    assert "left out 1 question(s) whose prompt holds no full page" in table
    documents = {line["document"] for line in read_lines(out / "questions.jsonl")}
    assert documents == {Example(prose(i, 60)).fingerprint for i in range(1, 5)}


def test_every_measurement_is_kept_with_seed_and_command(run):
    out, rows = run
    lines = read_lines(out / "questions.jsonl")
    assert len(lines) == 4 * len(rows)
    assert {(line["seed"], line["command"]) for line in lines} == {(3, "scd evaluate same")}
    scd = [line for line in lines if line["method"] == "scd"]
    total = sum(line["nbytes"] for line in scd) / sum(line["coded_tokens"] for line in scd)
    assert total == pytest.approx(rows["scd"].bytes_per_token)
    assert len(read_lines(out / "windows.jsonl")) == 2 * len(rows)


def test_a_missing_artefact_is_named_with_the_command_that_makes_it(registry, questions, tmp_path, capsys):
    rows = evaluate("same", registry, questions, None, 1, tmp_path)
    assert "scd_paper_reuse" not in {row.method for row in rows}
    printed = capsys.readouterr().out
    assert "scd calibrate" in printed
    assert "--method paper-reuse" in printed
    assert "same--paper-reuse" in printed
    assert all(row.ppl is None and row.spread["questions"] == 1 for row in rows)


def test_a_text_alone_gives_perplexity_and_kl(registry, text, tmp_path):
    rows = {r.method: r for r in evaluate("same", registry.root, None, text, None, tmp_path, windows=1)}
    assert rows["scd"].f1 is None
    assert rows["scd"].kl < 1e-4 < rows["scd_paper"].kl
    assert rows["scd"].ppl is not None
    assert not (tmp_path / "questions.jsonl").exists()


def test_nothing_to_measure_is_an_error(registry, questions, tmp_path):
    with pytest.raises(CorpusError, match="nothing to evaluate on"):
        evaluate("same", registry, None, None, None, tmp_path)
    short = tmp_path / "short.json"
    write_questions(short, [Example("old", "new ?", "road")])
    with pytest.raises(CorpusError, match="long enough"):
        evaluate("same", registry, short, None, None, tmp_path)
    with pytest.raises(ArtefactError):
        evaluate("nobody", registry, questions, None, None, tmp_path)


def test_other_weights_than_were_calibrated_are_refused(registry, questions, tmp_path):
    """A table about models that the artefact was not made for would look as good as any other."""
    other = str(tiny_folder(tmp_path / "other", "llama", seed=9))
    for where in ({"producer_source": other}, {"specialist_source": other}):
        with pytest.raises(FingerprintError):
            evaluate("same", registry, questions, None, None, tmp_path / "out", **where)
    assert not (tmp_path / "out").exists()


def test_a_damaged_artefact_of_the_paper_is_not_taken_for_a_missing_one(registry, questions, tmp_path):
    copy = tmp_path / "registry"
    shutil.copytree(registry.root, copy)
    (tensors,) = (copy / "specialists" / "same--paper").glob("*.safetensors")
    data = bytearray(tensors.read_bytes())
    data[-1] ^= 1
    tensors.write_bytes(bytes(data))
    with pytest.raises(ArtefactDigestError):
        evaluate("same", copy, questions, None, None, tmp_path / "out")


def test_a_limit_draws_by_seed(registry, questions, tmp_path):
    def drawn(seed: int) -> set[str]:
        out = tmp_path / str(seed)
        evaluate("same", registry, questions, None, 2, out, seed)
        return {line["document"] for line in read_lines(out / "questions.jsonl")}

    assert drawn(0) == drawn(0)
    assert len(drawn(0)) == 2
    assert len({frozenset(drawn(seed)) for seed in range(4)}) > 1
