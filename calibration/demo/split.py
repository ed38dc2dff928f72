"""Writes a demo task's examples as question files: those its LoRA was trained on, and those it never saw.

``python -m calibration.demo.split facts --questions cloze.train.json --out DIR`` writes ``DIR/facts.fit.json``, to
calibrate on, and ``DIR/facts.heldout.json``, to evaluate on.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from calibration.corpus import write_questions
from calibration.demo.train import examples_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=["blank", "facts"])
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for part, examples in zip(("fit", "heldout"), examples_of(args.task, args.questions), strict=True):
        path = args.out / f"{args.task}.{part}.json"
        write_questions(path, examples)
        print(f"{path}: {len(examples)} examples")


if __name__ == "__main__":
    main()
