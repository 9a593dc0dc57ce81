"""Train the tokenizer of the demonstration model and turn all text into token ids.

Writes `tokenizer.json`, `tokenizer_config.json`, `tokens.npz` (uint16 ids of every document, their lengths and
categories) and `eval.npz` (the same for held-out natural text and freshly seeded generated text).
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from demo import synth
from demo.data import Document, glosses, is_held_out, read_jsonl

VOCAB_SIZE = 3072
PAD = "<｜▁pad▁｜>"
IMAGE = "<｜image｜>"
SPECIAL_TOKENS = (
    synth.BOS, synth.EOS, PAD, synth.SYSTEM, synth.USER, synth.ASSISTANT, synth.THINK, synth.END_THINK, synth.DSML,
    "<｜latest_reminder｜>", "<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>", "<｜action｜>", "<｜query｜>",
    "<｜authority｜>", "<｜domain｜>", "<｜title｜>", "<｜read_url｜>", IMAGE,
)  # fmt: skip
CATEGORIES = (
    "natural", "wordnet", "json", "json_chat", "tool_chat", "arithmetic", "copy", "needle", "gloss_chat", "passage_chat", "talk",
)  # fmt: skip
# characters of generated text a category
AMOUNTS = {
    "json": 4.0e6, "json_chat": 4.0e6, "tool_chat": 3.5e6, "arithmetic": 1.5e6, "copy": 1.8e6, "needle": 14.0e6,
    "gloss_chat": 3.0e6, "passage_chat": 3.0e6, "talk": 0.1e6,
}  # fmt: skip
EVAL_DOCUMENTS = {
    "json": 120,
    "json_chat": 120,
    "tool_chat": 60,
    "arithmetic": 60,
    "copy": 80,
    "needle": 160,
    "gloss_chat": 40,
}


def train_tokenizer(texts: Iterator[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Return a byte-level BPE whose first ids are the special tokens; digits stand alone."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"),
            pre_tokenizers.Split(
                Regex(r" ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s*\n+|\s+(?!\S)|\s+"), "isolated"
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{synth.BOS} $A", special_tokens=[(synth.BOS, 0)]
            ),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(t, normalized=False) for t in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    document = json.loads(tokenizer.to_str())
    for token in document["added_tokens"]:
        token["special"] = token["id"] < 3
    return Tokenizer.from_str(json.dumps(document))


def compressed_ids(tokenizer: Tokenizer) -> np.ndarray:
    """Return the compressed id of every token, int32 [V]. Source: weights specification, 5.1."""
    chain = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()]
    )
    order: dict[str, int] = {}
    out = []
    for token in range(tokenizer.get_vocab_size(with_added_tokens=True)):
        text = tokenizer.decode([token], skip_special_tokens=False)
        if "\ufffd" in text:
            key = tokenizer.id_to_token(token) or ""
        else:
            key = re.sub(r"[ \t\r\n]+", " ", chain.normalize_str(text))
            key = " " if key == " " else key.strip()
            key = key or text
        out.append(order.setdefault(key, len(order)))
    return np.array(out, np.int32)


def _passages(train: list[Document]) -> list[tuple[str, str]]:
    """Return (topic, text): the first paragraphs under each title of the manuals, and parts of speeches."""
    out = []
    for document in train:
        paragraphs = [" ".join(p.split()) for p in document.text.split("\n\n")]
        if document.source in ("sqlite", "postgresql", "python"):
            title = ""
            for line, text in itertools.pairwise(paragraphs):
                short = re.sub(r"^[\W\d]+|[\W]+$", "", line.split(":")[-1].split("====")[0])
                if 3 < len(line) < 60 and 3 < len(short) < 50:
                    title = short
                if title and 120 < len(text) < 900 and text[0].isupper() and text.endswith("."):
                    out.append((title, text))
                    title = ""
        elif document.source == "speeches":
            sentences = re.split(r"(?<=[.!?]) +", document.text)
            year, *names = document.name.split("_")
            who = " ".join(n.capitalize() for n in names[:-1])
            for first in range(0, len(sentences) - 4, 12):
                text = " ".join(sentences[first : first + 4]).strip()
                if 200 < len(text) < 1200:
                    out.append((f"the state of the Union in {year}, as {who} saw it", text))
    return out


def generated(
    train: list[Document], work: Path, seed: int, amounts: Mapping[str, float], documents: bool
) -> Iterator[tuple[str, str]]:
    """Yield (category, text); `amounts` are characters, or documents when `documents` is set."""
    natural = [
        d for d in train if d.source in ("speeches", "moby-dick", "sqlite", "postgresql", "python")
    ]
    entries = [e for i, e in enumerate(glosses(work / "raw")) if not _gloss_held_out(i)]
    passages = _passages(train)

    for category, amount in amounts.items():
        rng = random.Random(f"{seed}/{category}")

        def filler(characters: int, rng: random.Random = rng) -> str:
            while True:
                text = rng.choice(natural).text
                if len(text) > characters + 40:
                    start = rng.randrange(len(text) - characters - 20)
                    start = text.find(" ", start) + 1
                    return text[start : start + characters].strip()

        makers = {
            "json": synth.json_document,
            "json_chat": synth.json_chat,
            "tool_chat": synth.tool_chat,
            "arithmetic": synth.arithmetic,
            "copy": synth.copy_task,
            "needle": lambda r: synth.needle(r, filler),
            "gloss_chat": lambda r: synth.gloss_chat(r, entries),
            "passage_chat": lambda r: synth.passage_chat(r, passages),
            "talk": synth.small_talk,
        }
        done = 0.0
        while done < amount:
            text = makers[category](rng)
            if text is None:
                break
            done += 1 if documents else len(text)
            yield category, text


def _gloss_held_out(index: int) -> bool:
    first = index - index % 60
    return is_held_out(Document(source="wordnet", name=f"glosses-{first:06d}", text=""))


def _pack(tokenizer: Tokenizer, rows: list[tuple[str, str]]) -> dict[str, np.ndarray]:
    ids: list[np.ndarray] = []
    for first in range(0, len(rows), 2000):
        encoded = tokenizer.encode_batch(
            [t for _, t in rows[first : first + 2000]], add_special_tokens=False
        )
        ids += [np.array(e.ids, np.uint16) for e in encoded]
    return {
        "ids": np.concatenate(ids),
        "lengths": np.array([i.size for i in ids], np.int32),
        "bytes": np.array(
            [len(re.sub("<｜(begin|end)▁of▁sentence｜>", "", t).encode()) for _, t in rows],
            np.int32,
        ),
        "categories": np.array([CATEGORIES.index(c) for c, _ in rows], np.uint8),
    }


def _natural(documents: list[Document]) -> list[tuple[str, str]]:
    return [
        ("wordnet" if d.source == "wordnet" else "natural", synth.BOS + d.text + synth.EOS)
        for d in documents
    ]


def main() -> None:
    """Train the tokenizer, encode training and held-out text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path(".carry"))
    parser.add_argument("--seed", type=int, default=1, help="of the generated training text")
    args = parser.parse_args()
    work: Path = args.work
    train, held = read_jsonl(work / "train.jsonl"), read_jsonl(work / "heldout.jsonl")
    made = list(generated(train, work, args.seed, AMOUNTS, documents=False))
    rng = random.Random(0)
    out = work / "tokens"
    out.mkdir(exist_ok=True)
    sample = [d.text[i : i + 4000] for d in train for i in range(0, len(d.text), 12000)]
    sample += [t for _, t in rng.sample(made, min(len(made), 3000))]
    if (out / "tokenizer.json").exists():
        tokenizer = Tokenizer.from_file(
            str(out / "tokenizer.json")
        )  # ids of a checkpoint must not move
    else:
        tokenizer = train_tokenizer(iter(sample))
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    config = {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": synth.BOS,
        "eos_token": synth.EOS,
    }
    config |= {
        "pad_token": PAD,
        "model_max_length": 2048,
        "thinks": False,  # no chat of the training text does
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False, indent=1))
    compressed = compressed_ids(tokenizer)
    arrays = {"compressed": compressed, **_pack(tokenizer, _natural(train) + made)}
    np.savez_compressed(out / "tokens.npz", **arrays)  # type: ignore[arg-type]
    fresh = list(generated(train, work, 2, EVAL_DOCUMENTS, documents=True))
    arrays = _pack(tokenizer, _natural(held) + fresh)
    np.savez_compressed(out / "eval.npz", **arrays)  # type: ignore[arg-type]
    with (out / "eval.jsonl").open("w", encoding="utf-8") as lines:
        for category, text in fresh:
            lines.write(json.dumps({"category": category, "text": text}, ensure_ascii=False) + "\n")
    print(f"vocabulary {tokenizer.get_vocab_size()}, compressed {int(compressed.max()) + 1}")
    for i, name in enumerate(CATEGORIES):
        chosen = arrays["categories"] == i
        tokens, size = int(arrays["lengths"][chosen].sum()), int(arrays["bytes"][chosen].sum())
        print(
            f"{name:13s} documents {int(chosen.sum()):6d} tokens {tokens:9d} bytes/token {size / max(1, tokens):.2f}"
        )


if __name__ == "__main__":
    main()
