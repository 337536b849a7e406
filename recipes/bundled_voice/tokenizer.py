"""A small byte-level BPE in the official tokenizer's file form.

Merges are learned on the training sentences with Qwen2's splitting rule; then the merges that
make "assistant" one token are appended, because the prompt is cut at fixed token positions.

    python tokenizer.py TRAIN.tsv OUTDIR --merges 512
"""

import argparse
import json
import random
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>"]


def build(vocab: dict, merges: list[tuple[str, str]], dropout: float | None = None) -> Tokenizer:
    t = Tokenizer(models.BPE(vocab=vocab, merges=merges, dropout=dropout, fuse_unk=False))
    t.normalizer = normalizers.NFC()
    t.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    t.decoder = decoders.ByteLevel()
    t.add_special_tokens([AddedToken(s, normalized=False, special=True) for s in SPECIAL])
    return t


def learn(texts: list[str], merges: int) -> tuple[dict, list[tuple[str, str]]]:
    t = Tokenizer(models.BPE())
    t.normalizer = normalizers.NFC()
    t.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    t.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=256 + merges, initial_alphabet=alphabet, show_progress=False, max_token_length=6),
    )
    model = json.loads(t.to_str())["model"]
    vocab = dict(model["vocab"])
    rules = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in model["merges"]]
    parts = build(vocab, rules).encode("assistant").tokens
    while len(parts) > 1:
        rules.append((parts[0], parts[1]))
        parts = [parts[0] + parts[1], *parts[2:]]
        vocab.setdefault(parts[0], len(vocab))
    return vocab, rules


def save(folder: Path, vocab: dict, merges: list[tuple[str, str]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges))
    added = {
        str(len(vocab) + i): dict(content=s, lstrip=False, rstrip=False, normalized=False, single_word=False, special=True)
        for i, s in enumerate(SPECIAL)
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            dict(
                tokenizer_class="Qwen2Tokenizer",
                processor_class="Qwen3TTSProcessor",
                added_tokens_decoder=added,
                add_prefix_space=False,
                bos_token=None,
                eos_token="<|im_end|>",
                pad_token="<|endoftext|>",
                unk_token=None,
                errors="replace",
                model_max_length=131072,
                clean_up_tokenization_spaces=False,
                split_special_tokens=False,
            ),
            indent=1,
        )
    )


def load(folder: Path, dropout: float | None = None) -> Tokenizer:
    vocab = json.loads((folder / "vocab.json").read_text())
    merges = [tuple(line.split(" ")) for line in (folder / "merges.txt").read_text().splitlines()[1:] if line]
    return build(vocab, merges, dropout)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("rows", type=Path)
    p.add_argument("out", type=Path)
    p.add_argument("--merges", type=int, default=512)
    a = p.parse_args()
    texts = [line.split("\t")[2] for line in a.rows.read_text().splitlines()]
    save(a.out, *learn(texts, a.merges))
    t = load(a.out)
    ids = t.encode("<|im_start|>assistant\nHello there, how are you?<|im_end|>\n<|im_start|>assistant\n")
    assert len(t.encode("assistant").ids) == 1, "the prompt's fixed positions need it as one token"
    assert (ids.tokens[1], ids.tokens[-5]) == ("assistant", "<|im_end|>"), ids.tokens
    sample = random.Random(0).sample(texts, 500)
    count = sum(len(t.encode(x).ids) for x in sample)
    print(f"{t.get_vocab_size()} tokens; {sum(map(len, sample)) / count:.2f} characters a token; {ids.tokens}")


if __name__ == "__main__":
    main()
