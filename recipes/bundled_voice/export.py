"""Write the trained models as a checkpoint in the official Qwen3-TTS layout (CustomVoice).

python export.py TALKER_FOLDER CODEC_FOLDER TOKENIZER_FOLDER OUT [--voices heart,deep,bright] [--dtype bfloat16]
"""

import argparse
import hashlib
import json
import shutil
from pathlib import Path

import codec as codecs
import shapes
import talker as talkers
import tokenizer as tok
import torch
from safetensors.torch import save_file

# Chosen by word error rate on held-out sentences (README).
GENERATION = dict(
    do_sample=True,
    temperature=0.7,
    top_k=30,
    top_p=1.0,
    repetition_penalty=1.0,
    subtalker_dosample=True,
    subtalker_temperature=0.7,
    subtalker_top_k=30,
    subtalker_top_p=1.0,
    max_new_tokens=1024,
)
FEATURES = dict(
    feature_extractor_type="EncodecFeatureExtractor",
    chunk_length_s=None,
    feature_size=1,
    overlap=None,
    padding_side="right",
    padding_value=0.0,
    return_attention_mask=True,
    sampling_rate=24000,
)


def talker_tensors(model: talkers.Talker) -> dict:
    w = model.state_dict()
    out = {
        "talker.model.codec_embedding.weight": w["code.weight"],
        "talker.model.text_embedding.weight": w["text_embedding.weight"],
        "talker.codec_head.weight": w["head.weight"],
        "talker.code_predictor.small_to_mtp_projection.weight": w["narrow.weight"],
        "talker.code_predictor.small_to_mtp_projection.bias": w["narrow.bias"],
    }
    for a, b in (("fc1", "linear_fc1"), ("fc2", "linear_fc2")):
        for kind in ("weight", "bias"):
            out[f"talker.text_projection.{b}.{kind}"] = w[f"{a}.{kind}"]
    for k, table in enumerate(w["rest.weight"].chunk(shapes.CODEBOOKS - 1)):
        out[f"talker.code_predictor.model.codec_embedding.{k}.weight"] = table
        out[f"talker.code_predictor.lm_head.{k}.weight"] = w["heads"][k]
    for name, tensor in w.items():
        if name.startswith("model."):
            out["talker." + name] = tensor
        elif name.startswith("predictor."):
            out["talker.code_predictor.model." + name.removeprefix("predictor.")] = tensor
    return out


def codec_tensors(model: codecs.Codec) -> dict:
    w, q = model.state_dict(), model.quantiser
    out = {n: t for n, t in w.items() if n.startswith(("decoder.", "encoder."))}
    one = torch.ones(shapes.ENTRIES)
    for branch, old, source, sink, books in (
        ("rvq_first", "semantic", q.first_in, q.first_out, q.table[:1]),
        ("rvq_rest", "acoustic", q.rest_in, q.rest_out, q.table[1:]),
    ):
        dec, enc = f"decoder.quantizer.{branch}", f"encoder.quantizer.{old}_residual_vector_quantizer"
        out[f"{dec}.output_proj.weight"], out[f"{enc}.input_proj.weight"] = sink.weight, source.weight
        # Present in official files and read by nobody.
        out[f"{dec}.input_proj.weight"] = torch.zeros(sink.weight.shape[1], sink.weight.shape[0], 1)
        out[f"{enc}.output_proj.weight"] = torch.zeros(source.weight.shape[1], source.weight.shape[0], 1)
        for k, table in enumerate(books):
            (
                out[f"{dec}.vq.layers.{k}._codebook.cluster_usage"],
                out[f"{dec}.vq.layers.{k}._codebook.embedding_sum"],
            ) = one, table
            c = f"{enc}.layers.{k}.codebook"
            out[f"{c}.cluster_usage"], out[f"{c}.embed_sum"], out[f"{c}.initialized"] = (
                one,
                table,
                torch.ones(1),
            )
    return out


def config(vocab: int, special: dict, voices: list[str]) -> dict:
    speakers = dict(spk_id={v: shapes.VOICES[v] for v in voices}, spk_is_dialect=dict.fromkeys(voices, False))
    return dict(
        architectures=["Qwen3TTSForConditionalGeneration"],
        model_type="qwen3_tts",
        tokenizer_type="qwen3_tts_tokenizer_12hz",
        tts_model_size="0b6",
        tts_model_type="custom_voice",
        **special,
        talker_config=dict(shapes.TALKER, text_vocab_size=vocab, **speakers),
    )


def export(talker: Path, codec: Path, tokenizer: Path, out: Path, dtype: torch.dtype, voices: list[str]) -> None:
    (out / "speech_tokenizer").mkdir(parents=True, exist_ok=True)
    dump = lambda path, obj: (out / path).write_text(json.dumps(obj, indent=1) + "\n")
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, out / name)
    t, model = tok.load(tokenizer), talkers.load(talker, "cpu")
    ids = {
        f"{k}_token_id": t.token_to_id(s)
        for k, s in (
            ("assistant", "assistant"),
            ("im_start", "<|im_start|>"),
            ("im_end", "<|im_end|>"),
            ("tts_pad", "<tts_pad>"),
            ("tts_bos", "<tts_text_bos>"),
            ("tts_eos", "<tts_text_eod>"),
        )
    }
    dump("config.json", config(model.text_embedding.num_embeddings, ids, voices))
    dump("generation_config.json", GENERATION)
    dump(
        "preprocessor_config.json",
        dict(
            padding_side="left",
            padding_value=0.0,
            processor_class="Qwen3TTSProcessor",
            return_attention_mask=True,
        ),
    )
    dump("speech_tokenizer/config.json", shapes.CODEC)
    dump("speech_tokenizer/configuration.json", {"framework": "pytorch", "task": "text-to-speech"})
    dump("speech_tokenizer/preprocessor_config.json", FEATURES)
    whole = lambda tensors: {n: v.detach().to(dtype).contiguous().clone() for n, v in tensors.items()}
    save_file(whole(talker_tensors(model)), out / "model.safetensors", {"format": "pt"})
    save_file(
        whole(codec_tensors(codecs.load(codec, "cpu"))),
        out / "speech_tokenizer" / "model.safetensors",
        {"format": "pt"},
    )
    files = sorted(p for p in out.rglob("*") if p.is_file() and p.name != "SHA256SUMS")
    (out / "SHA256SUMS").write_text("".join(f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.relative_to(out)}\n" for p in files))
    print(f"{sum(p.stat().st_size for p in files) / 1e6:.2f} MB in {out}")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("talker", "codec", "tokenizer", "out"):
        p.add_argument(name, type=Path)
    p.add_argument("--dtype", default="bfloat16")
    p.add_argument("--voices", default="heart,deep,bright", help="those that were trained")
    p.add_argument("--tiny", action="store_true")
    a = p.parse_args()
    if a.tiny:
        shapes.tiny()
    export(a.talker, a.codec, a.tokenizer, a.out, getattr(torch, a.dtype), a.voices.split(","))


if __name__ == "__main__":
    main()
