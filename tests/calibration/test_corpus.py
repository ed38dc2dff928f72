"""Readers of every kind of corpus, and the split that must not leak a document."""

import json
import sys
import types

import pytest

from calibration.corpus import (
    Example,
    document_groups,
    read_corpus,
    read_nested,
    read_questions,
    split_by_document,
    text_documents,
    write_questions,
)
from scd_core.errors import CorpusError

WIKITEXT = """
 = Homarus gammarus =

 A lobster of the Atlantic .

 = = Description = =

 It has claws .

 = Frank =

 He was born in 1900 .
"""


def words(start: int, count: int) -> str:
    return " ".join(f"w{i}" for i in range(start, start + count))


def test_overlapping_windows_are_one_document():
    """Guards against a held-out window whose other half calibration saw."""
    examples = [Example(words(0, 60)), Example(words(1000, 60)), Example(words(30, 60))]
    assert document_groups(examples) == [[0, 2], [1]]
    for seed in range(8):
        fit, held_out = split_by_document(examples, 0.5, seed)
        assert sorted(map(len, (fit, held_out))) == [1, 2]


def test_windows_of_one_named_document_stay_together_without_shared_text():
    examples = [Example(words(100 * i, 40), document=name) for i, name in enumerate("aabb")]
    assert document_groups(examples) == [[0, 1], [2, 3]]


def test_a_split_of_one_document_is_refused():
    with pytest.raises(CorpusError, match="two at least"):
        split_by_document([Example("same", "a", "b"), Example("same", "c", "d")], 0.5, 0)
    with pytest.raises(CorpusError, match="between 0 and 1"):
        split_by_document([Example("a"), Example("b")], 1.0, 0)


def test_questions_survive_a_round_trip(tmp_path):
    path = tmp_path / "q.json"
    examples = [Example("Ein Text\nmit Zeilen", "Was?", "ü"), Example("另一", "何?", "答")]
    write_questions(path, examples)
    assert read_questions(path) == examples == read_corpus(path)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("[", "not JSON"),
        ("[]", "non-empty"),
        ('[{"context": "c", "question": "q"}]', "entry 0 needs"),
        ('[{"context": "c", "question": "q", "answer": ""}]', "entry 0 needs"),
        ('{"rows": []}', "not SQuAD"),
        ('{"data": [{"paragraphs": [{"context": "c", "qas": []}]}]}', "no answered question"),
    ],
)
def test_a_bad_question_file_is_named(tmp_path, content, complaint):
    path = tmp_path / "q.json"
    path.write_text(content)
    with pytest.raises(CorpusError, match=complaint):
        read_corpus(path)


def test_a_missing_file_is_not_taken_for_a_dataset_id():
    """Guards against a typing error in a file's name that goes to the network as a dataset id."""
    for name in ("no/such/corpus.jsonl", "/no/such/corpus"):
        with pytest.raises(CorpusError, match="no such file"):
            read_corpus(name)


def test_wikitext_headings_part_documents_but_sections_do_not(tmp_path):
    path = tmp_path / "wiki.txt"
    path.write_text(WIKITEXT)
    documents = text_documents(path)
    assert [title for title, _ in documents] == ["0: Homarus gammarus", "1: Frank"]
    assert "Description" in documents[0][1]
    assert "claws" in documents[0][1]
    assert "Frank" not in documents[0][1]
    assert [e.document for e in read_corpus(path)] == ["0: Homarus gammarus", "1: Frank"]


def test_plain_text_is_cut_into_windows_that_lose_nothing(tmp_path):
    path = tmp_path / "plain.txt"
    paragraphs = [words(1000 * i, 30 + 97 * i) for i in range(6)]
    path.write_text("\n\n".join(paragraphs))
    examples = read_corpus(path)
    assert len(examples) > 6
    assert all(len(e.context) <= 1200 for e in examples)
    assert " ".join(e.context for e in examples).split() == " ".join(paragraphs).split()
    # windows of the same block name the same document: six blocks at most
    assert 2 < len(document_groups(examples)) <= 6


def test_text_without_spaces_is_cut_too(tmp_path):
    path = tmp_path / "chinese.txt"
    text = "".join(chr(0x4E00 + i) for i in range(3000))
    path.write_text(text, encoding="utf-8")
    examples = read_corpus(path)
    assert "".join(e.context for e in examples) == text
    assert len(examples) == 3


def test_jsonl_holds_documents_or_questions(tmp_path):
    path = tmp_path / "corpus.jsonl"
    rows = [{"text": "one\u2028two"}, {"context": "c", "question": "q", "answer": "a"}, {"context": "d"}]
    # U+2028 is a line end to str.splitlines, and must not part a row
    path.write_text("\n".join(json.dumps(r, ensure_ascii=False) for r in rows) + "\n\n", encoding="utf-8")
    assert read_corpus(path) == [Example("one\u2028two"), Example("c", "q", "a"), Example("d")]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 2: not JSON"),
        ('["a"]', "line 2: expected an object"),
        ('{"body": "x"}', "line 2: needs text.*has body"),
        ('{"text": 3}', "line 2: needs text"),
        ('{"context": "c", "answer": "a"}', "'question' must be text"),
        ('{"context": "c", "question": "q"}', "'answer' must be text"),
    ],
)
def test_a_bad_line_is_named_by_number(tmp_path, line, complaint):
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"text": "fine"}\n' + line)
    with pytest.raises(CorpusError, match=complaint):
        read_corpus(path)


def test_squad_and_cmrc_nesting_with_several_answers(tmp_path):
    path = tmp_path / "squad.json"
    qas = [
        {"question": "q1", "id": "1", "answers": [{"text": "a", "answer_start": 0}, {"text": "b"}, {"text": "a"}]},
        {"question": "unanswerable", "id": "2", "answers": [], "is_impossible": True},
    ]
    path.write_text(json.dumps({"version": "v1", "data": [{"paragraphs": [{"context": "c", "qas": qas}]}]}))
    (example,) = read_nested(path)
    assert (example.context, example.question, example.references) == ("c", "q1", ("a", "b"))
    assert read_corpus(path) == [example]


def test_text_that_is_not_utf8_is_named(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"caf\xe9")
    with pytest.raises(CorpusError, match="not UTF-8"):
        read_corpus(path)


def test_a_dataset_id_without_the_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(CorpusError, match=r"pip install .*\[hub\]"):
        read_corpus("rajpurkar/squad")


def test_a_dataset_id_is_read_with_its_configuration_and_split(monkeypatch):
    """The rows are SQuAD's as the hub serves them; only the download is replaced."""
    asked = []

    def load_dataset(name, config, split):
        asked.append((name, config, split))
        return [
            {"context": "c", "question": "q", "answers": {"text": ["a", "b"], "answer_start": [0, 1]}},
            {"context": "c", "question": "q2", "answers": {"text": [], "answer_start": []}},
            {"text": ""},
        ]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert read_corpus("some/set:plain:validation") == [Example("c", "q", "a", ("b",))]
    read_corpus("some/set")
    assert asked == [("some/set", "plain", "validation"), ("some/set", None, "train")]


def test_a_dataset_that_cannot_be_had_is_a_corpus_error(monkeypatch):
    def load_dataset(name, config, split):
        raise ConnectionError("offline")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(CorpusError, match="offline"):
        read_corpus("some/set")
