"""Reads a corpus of any of the accepted kinds into examples.

======================  =====================================================================================
``FILE.json``           a list of ``{context, question, answer}``, or SQuAD's and CMRC2018's nested form
``FILE.jsonl``          per line ``{text}``, or ``{context}`` with, perhaps, ``question`` and ``answer``
any other file          plain text: documents by WikiText headings (`` = Title = ``), else by blank lines
``ID[:CONFIG[:SPLIT]]``  a Hugging Face dataset with such columns (needs the optional ``datasets`` package)
======================  =====================================================================================

A document of plain text is cut into windows of about ``WINDOW`` characters, each an example that names its
document, so that a split keeps the windows of one document together.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from calibration.documents import Example, document_groups, split_by_document
from scd_core.errors import CorpusError

__all__ = [
    "Example",
    "document_groups",
    "read_corpus",
    "read_hub",
    "read_jsonl",
    "read_nested",
    "read_questions",
    "read_text",
    "split_by_document",
    "text_documents",
    "write_questions",
]

WINDOW = 1200
_HEADING = re.compile(r"^ ?= (?!=)(.+?) =\s*$", re.MULTILINE)
_FILE_SUFFIXES = {".json", ".jsonl", ".txt", ".md", ".raw", ".tokens"}


def read_corpus(source: str | Path) -> list[Example]:
    """Examples of a file or of a dataset id.

    Raises:
        CorpusError: it is missing, malformed or empty, or needs a package that is not installed.
    """
    path = Path(source)
    if not path.is_file():
        if path.exists() or path.suffix in _FILE_SUFFIXES or path.is_absolute():
            raise CorpusError(f"{path}: no such file")
        return read_hub(str(source))
    if path.suffix == ".jsonl":
        return read_jsonl(path)
    if path.suffix == ".json":
        return read_nested(path) if _is_nested(path) else read_questions(path)
    return read_text(path)


def text_documents(path: Path) -> list[tuple[str, str]]:
    """``(title, text)`` of each document of a plain text file.

    Documents begin at headings of the form `` = Title = ``; a file without any is one document per block of
    paragraphs: blank lines part paragraphs, and paragraphs are joined until a window is full.

    Raises:
        CorpusError: the file is missing, not UTF-8, or holds no text.
    """
    text = _read(path)
    headings = list(_HEADING.finditer(text))
    if headings:
        ends = [h.start() for h in headings[1:]] + [len(text)]
        found = [(h[1].strip(), text[h.end() : e].strip()) for h, e in zip(headings, ends, strict=True)]
        documents = [(f"{i}: {title}", body) for i, (title, body) in enumerate(found) if body]
    else:
        blocks = _join((p.strip() for p in re.split(r"\n\s*\n", text)), WINDOW)
        documents = [(f"{i}", block) for i, block in enumerate(blocks)]
    if not documents:
        raise CorpusError(f"{path}: holds no text")
    return documents


def read_text(path: Path, window: int = WINDOW) -> list[Example]:
    """Windows of about ``window`` characters of each document of a plain text file.

    Raises:
        CorpusError: as :func:`text_documents`.
    """
    return [
        Example(piece, document=title)
        for title, body in text_documents(path)
        for piece in _join(_pieces(body, window), window)
    ]


def read_jsonl(path: Path) -> list[Example]:
    """Examples of a file with one JSON object per line.

    Raises:
        CorpusError: the file is missing or empty, or a line is not such an object.
    """
    lines = [(n, line) for n, line in enumerate(_read(path).split("\n"), 1) if line.strip()]
    examples = []
    for number, line in lines:
        try:
            row = json.loads(line)
        except ValueError as error:
            raise CorpusError(f"{path}, line {number}: not JSON ({error})") from None
        examples += _row(row, f"{path}, line {number}")
    if not examples:
        raise CorpusError(f"{path}: holds no examples")
    return examples


def read_questions(path: Path) -> list[Example]:
    """Examples of a JSON list of ``{context, question, answer}``.

    Raises:
        CorpusError: the file is missing, is not such a list, or an entry lacks a text field.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CorpusError(f"{path}: no such file") from None
    except ValueError as error:
        raise CorpusError(f"{path}: not JSON ({error})") from None
    if not isinstance(rows, list) or not rows:
        raise CorpusError(f"{path}: expected a non-empty JSON list of {{context, question, answer}}")
    return [_question(path, i, row) for i, row in enumerate(rows)]


def _question(path: Path, index: int, row: object) -> Example:
    fields = ("context", "question", "answer")
    if not isinstance(row, dict) or not all(isinstance(row.get(f), str) and row[f] for f in fields):
        raise CorpusError(f"{path}: entry {index} needs non-empty text in {', '.join(fields)}")
    return Example(row["context"], row["question"], row["answer"])


def write_questions(path: Path, examples: Iterable[Example]) -> None:
    """The inverse of :func:`read_questions`."""
    rows = [{"context": e.context, "question": e.question, "answer": e.answer} for e in examples]
    path.write_text(json.dumps(rows, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")


def read_nested(path: Path) -> list[Example]:
    """Examples of SQuAD's form, ``data[].paragraphs[].qas[]``, which CMRC2018 shares; unanswerable ones left out.

    Raises:
        CorpusError: the file is not of that form, or holds no answered question.
    """
    try:
        articles = json.loads(_read(path))["data"]
        asked = [
            (f"{number}", paragraph["context"], qa["question"], _answers(qa["answers"]))
            for number, article in enumerate(articles)
            for paragraph in article["paragraphs"]
            for qa in paragraph["qas"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise CorpusError(f"{path}: not SQuAD's form ({type(error).__name__}: {error})") from None
    examples = [
        Example(context, question, answers[0], tuple(answers[1:]), document)
        for document, context, question, answers in asked
        if answers
    ]
    if not examples:
        raise CorpusError(f"{path}: holds no answered question")
    return examples


def read_hub(identifier: str) -> list[Example]:
    """Examples of the Hugging Face dataset ``ID[:CONFIG[:SPLIT]]`` (split "train" unless said).

    Raises:
        CorpusError: ``datasets`` is not installed, or the dataset cannot be had or has other columns.
    """
    try:
        from datasets import load_dataset
    except ImportError:
        raise CorpusError(
            f"{identifier}: no such file; reading it as a Hugging Face dataset id needs the optional package: "
            "pip install 'semantic-cache-distillation[hub]'"
        ) from None
    name, config, split = [*identifier.split(":", 2), "", ""][:3]
    try:
        rows = load_dataset(name, config or None, split=split or "train")
    except Exception as error:  # the package raises errors of many kinds, its network client's among them
        raise CorpusError(f"{identifier}: neither a file nor a dataset that can be had ({error})") from error
    examples = [e for n, row in enumerate(rows) for e in _row(row, f"{identifier}, row {n}")]
    if not examples:
        raise CorpusError(f"{identifier}: holds no examples")
    return examples


def _row(row: Any, where: str) -> list[Example]:
    """The example of one row; none for a blank text or a question without an answer."""
    if not isinstance(row, dict):
        raise CorpusError(f"{where}: expected an object, got {type(row).__name__}")
    context = row.get("context", row.get("text"))
    if not isinstance(context, str):
        raise CorpusError(f"{where}: needs text in 'text' or 'context', has {', '.join(sorted(row)) or 'nothing'}")
    if not context.strip():
        return []
    question, given = row.get("question"), row.get("answer", row.get("answers"))
    if question is None and given is None:
        return [Example(context)]
    if not isinstance(question, str) or not question:
        raise CorpusError(f"{where}: 'question' must be text")
    try:
        answers = _answers(given)
    except (KeyError, TypeError):
        raise CorpusError(f"{where}: 'answer' must be text, or 'answers' as in SQuAD") from None
    return [Example(context, question, answers[0], tuple(answers[1:]))] if answers else []


def _answers(given: Any) -> list[str]:
    """The different answers of a text, ``{"text": [...]}``, a list of texts or a list of ``{"text"}``."""
    if isinstance(given, dict):
        given = given["text"]
    texts = [given] if isinstance(given, str) else [a if isinstance(a, str) else a["text"] for a in given]
    return list(dict.fromkeys(text for text in texts if text))


def _is_nested(path: Path) -> bool:
    return _read(path).lstrip("\ufeff \t\r\n").startswith("{")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise CorpusError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise CorpusError(f"{path}: not UTF-8 text ({error})") from None


def _pieces(text: str, window: int) -> Iterator[str]:
    """Lines, those longer than a window cut, at a space where there is one in the last quarter."""
    for line in (raw.strip() for raw in text.split("\n")):
        start = 0
        while len(line) - start > window:
            space = line.rfind(" ", start + 3 * window // 4, start + window)
            end = space if space > 0 else start + window
            yield line[start:end].strip()
            start = end
        yield line[start:].strip()


def _join(pieces: Iterable[str], window: int) -> Iterator[str]:
    """Pieces joined by line ends until the next would pass the window."""
    block = ""
    for piece in pieces:
        if block and len(block) + 1 + len(piece) > window:
            yield block
            block = ""
        block = f"{block}\n{piece}" if block and piece else block or piece
    if block:
        yield block
