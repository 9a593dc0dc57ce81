"""What is packed for the evaluation occurs nowhere in training."""

from __future__ import annotations

import random
import string

import numpy as np
import pytest
from demo.data import OVERLAP_BYTES, Document, is_held_out
from demo.heldout import GENERATED, generated, overlap
from tokenizers import Tokenizer

from deepinfer.bench.evaldata import generated_documents, held_out_documents


def document(text: str, name: str = "x") -> Document:
    return Document(source="s", name=name, text=text)


LETTERS = "".join(random.Random(0).choices(string.ascii_lowercase, k=200))


@pytest.mark.parametrize(
    ("train", "held", "found"),
    [
        ([LETTERS], ["0" + LETTERS[:63] + "1"], (0, 0)),
        ([LETTERS], ["0" + LETTERS[:64] + "1"], (0, 1)),
        ([LETTERS], ["0" + LETTERS[20:90] + "1"], (0, 7)),
        (["x" * 80, LETTERS[:100]], [LETTERS[:100]], (1, 37)),
        (["x" * 80], [LETTERS, "y" * 70], (0, 0)),
    ],
)
def test_equal_documents_and_shared_runs(
    train: list[str], held: list[str], found: tuple[int, int]
) -> None:
    assert OVERLAP_BYTES == 64
    assert overlap([document(t) for t in train], [document(h) for h in held]) == found


def test_a_run_is_not_joined_from_two_documents() -> None:
    train = [document(LETTERS[:40]), document(LETTERS[40:120])]
    assert overlap(train, [document(LETTERS[:70])]) == (0, 0)


def test_known_pages_are_left_out(demo_folder: object) -> None:
    tokenizer = Tokenizer.from_file(f"{demo_folder}/tokenizer.json")
    first = generated(set(), tokenizer)
    assert len(first) == sum(GENERATED.values())
    ids = tokenizer.encode(first[1]["text"], add_special_tokens=False).ids
    second = generated({np.array(ids, np.uint16).tobytes()}, tokenizer)
    texts = {row["text"] for row in second}
    assert first[1]["text"] not in texts and {r["text"] for r in first[2:40]} <= texts


def test_packed_texts_are_the_recipes_held_out_part(demo_folder: object) -> None:
    for found in held_out_documents():
        assert is_held_out(Document(source=found.source, name=found.name, text="")), found.name
    tokenizer = Tokenizer.from_file(f"{demo_folder}/tokenizer.json")
    made = [row["text"] for row in generated(set(), tokenizer) if row["kind"] == "json"]
    packed = [found.text for found in generated_documents("json")]
    assert set(packed[:-4]) <= set(made), "a few may have been left out and replaced"
