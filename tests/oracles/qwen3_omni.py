"""Make tests/golden/qwen3_omni/: what the published implementation makes of text, sound, pictures and films.

The checkpoint is the tiny one of hocket/models/qwen3_omni/synthetic.py, which the tests write again for
themselves; what is kept is what the reference makes of it: fp32, eager attention, greedy, one thread. Speech
is in tests/oracles/qwen3_omni_speech.py.

    python -m venv omni-venv
    omni-venv/bin/pip install torch==2.13.0 torchvision==0.28.0 transformers==5.17.0 numpy==2.4.6 \\
        pillow==13.0.0 safetensors msgspec
    PYTHONPATH=. HF_HUB_OFFLINE=1 omni-venv/bin/python tests/oracles/qwen3_omni.py

(torch and torchvision of one build: both for CPU, or both from PyPI.)

Media are made from seeds by tests/media.py. Film frames go to the
processor with their rate (`fps`), of which its time positions are made.

thinker_<case>.npz
    ids        int32   [n]      the prompt, by the published processor and chat template
    positions  float32 [n, 3]   time, height, width
    tokens     int32   [t]      made, the end token included
    hidden     float32 [m, d]   hidden_states[accept_hidden_layer] at the media rows of user turns
    logits     float32 [vocab]  behind the prompt's last row
    state      float32 [d]      hidden_states[-1] there, normalised
    audio      float32 [n_a, d]         what the audio tower gives, in the order of the prompt
    vision     float32 [n_v / 4, d]         every fourth row that the vision tower gives for images and films
    deep       float32 [maps, n_v / 4, d]   of its deepstack maps

processors.npz
    mel_<n>             float32 [13, n // 160]  every tenth band of the features of recording(n)
    image_<h>x<w>       float32 [8, 1536]       eight of the patches of picture(h, w)
    sums_image_<h>x<w>  float32 [patches]       the sum of each
    grid_image_<h>x<w>  int64 [3]
    film_<t>x<h>x<w> …  alike
cases.json  the conversations, with media by their seeds; versions used
"""

from __future__ import annotations

import importlib.metadata
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoProcessor, Qwen3OmniMoeForConditionalGeneration

from hocket.models.qwen3_omni.synthetic import write_checkpoint
from tests.media import film, picture, recording

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "qwen3_omni"
PACKAGES = ["transformers", "torch", "torchvision", "numpy", "tokenizers"]
TOKENS = 12

SYSTEM = {"role": "system", "content": [{"type": "text", "text": "You hear, see and answer briefly."}]}
SOUND = {"type": "audio", "audio": {"samples": 16000 * 3 + 77, "seed": 1}}  # one window and a bit, ragged
BLIP = {"type": "audio", "audio": {"samples": 4321, "seed": 2}}  # shorter than a chunk
IMAGE = {"type": "image", "image": {"size": [100, 150], "seed": 3}}
TALL = {"type": "image", "image": {"size": [140, 60], "seed": 4}}
FILM = {"type": "video", "video": {"frames": 3, "size": [250, 420], "fps": 2.0, "seed": 5}}
HEARD = {"type": "video", "video": {"frames": 6, "size": [360, 370], "fps": 1.5, "seed": 6, "samples": 50000}}


def text(content: str) -> dict[str, str]:
    return {"type": "text", "text": content}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


CASES: dict[str, dict[str, Any]] = {
    "text": {"messages": [SYSTEM, user(text("Where do echoes go when nobody calls?"))]},
    "turns": {
        "messages": [
            user(text("Say <|im_end|> or naïve — 你好!")),
            {"role": "assistant", "content": [text("No.")]},
            user(text(" And\n\nnow? ")),
        ]
    },
    "tools": {
        "messages": [
            SYSTEM,
            user(text("What is 6 times 7?")),
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {"type": "function", "function": {"name": "multiply", "arguments": {"a": 6, "b": 7}}}
                ],
            },
            {"role": "tool", "content": "42"},
        ],
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "multiply",
                    "description": "Multiplies <b>two</b> numbers & more",
                    "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
                },
            }
        ],
    },
    "audio": {"messages": [SYSTEM, user(SOUND, text("What was that?"))]},
    "audio_short": {"messages": [user(text("This: "), BLIP)]},
    "image": {"messages": [SYSTEM, user(IMAGE, text("What is on it?"))]},
    "video": {"messages": [user(FILM, text("What happens?"))]},
    "audio_in_video": {"messages": [user(HEARD, text("Who speaks?"))], "audio_in_video": True},
    "mixed": {
        "messages": [
            SYSTEM,
            user(text("First "), TALL, text(" then "), SOUND, text(" and")),
            {"role": "assistant", "content": [text("Yes?")]},
            user(FILM, text("with"), IMAGE),
        ]
    },
}


def media(messages: list[dict[str, Any]]) -> tuple[list[Any], list[Any], list[Any], list[float]]:
    """Recordings, pictures, films and the films' rates, in the order of the messages."""
    audio, images, films, rates = [], [], [], []
    for message in messages:
        for part in message["content"]:
            kind = part["type"] if isinstance(part, dict) else "text"
            given = part[kind] if kind != "text" else None
            if kind == "audio":
                audio.append(recording(given["samples"], given["seed"]))
            elif kind == "image":
                images.append(picture(*given["size"], given["seed"]))
            elif kind == "video":
                films.append(film(given["frames"], *given["size"], given["seed"]))
                rates.append(given["fps"])
                if "samples" in given:
                    audio.append(recording(given["samples"], given["seed"]))
    return audio, images, films, rates


@torch.inference_mode()
def run(model: Any, processor: Any, case: dict[str, Any]) -> dict[str, np.ndarray]:
    config, thinker = model.config, model.thinker
    audio, images, films, rates = media(case["messages"])
    heard = case.get("audio_in_video", False)
    prompt = processor.apply_chat_template(
        case["messages"], tools=case.get("tools"), add_generation_prompt=True, tokenize=False
    )
    prompt = prompt.replace("Say <|im_end|>", "Say <|SHIELDED|>")  # see below
    inputs = processor(
        text=prompt,
        audio=audio or None,
        images=images or None,
        videos=films or None,
        fps=rates[0] if rates else 1.0,
        use_audio_in_video=heard,
        return_tensors="pt",
    )
    ids = inputs["input_ids"][0].tolist()
    if "<|SHIELDED|>" in prompt:
        # The published tokenizer would take a special token out of what a user writes; ours never does.
        plain = processor.tokenizer("<|SHIELDED|>", add_special_tokens=False)["input_ids"]
        wanted = [
            i for c in "<|im_end|>" for i in processor.tokenizer(c, add_special_tokens=False)["input_ids"]
        ]
        at = next(i for i in range(len(ids)) if ids[i : i + len(plain)] == plain)
        ids[at : at + len(plain)] = wanted
        inputs["input_ids"] = torch.tensor([ids])
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    made: dict[str, np.ndarray] = {"ids": np.array(ids, np.int32)}

    lengths = inputs["feature_attention_mask"].sum(-1) if audio else None
    positions, _ = thinker.get_rope_index(
        inputs["input_ids"],
        inputs.get("image_grid_thw"),
        inputs.get("video_grid_thw"),
        inputs["attention_mask"],
        heard,
        lengths,
        torch.as_tensor(inputs["video_second_per_grid"]) if films else None,
    )
    made["positions"] = positions[:, 0].T.float().numpy()
    if audio:
        towers = [
            thinker.get_audio_features(
                features[None, :, :n], torch.ones(1, n, dtype=torch.long)
            ).last_hidden_state
            for features, n in zip(inputs["input_features"], lengths.tolist(), strict=True)
        ]
        made["audio"] = torch.cat(towers).numpy()
    seen = []  # in the order of the prompt
    if images or films:
        parts = [part["type"] for m in case["messages"] for part in m["content"] if isinstance(part, dict)]
        pictures = iter(_towers(thinker.get_image_features, inputs, "pixel_values", "image_grid_thw"))
        movies = iter(_towers(thinker.get_video_features, inputs, "pixel_values_videos", "video_grid_thw"))
        seen = [next(pictures if kind == "image" else movies) for kind in parts if kind in ("image", "video")]
        made["vision"] = torch.cat([rows for rows, _ in seen])[::4].numpy()
        made["deep"] = torch.cat([deep for _, deep in seen], dim=1)[:, ::4].numpy()

    out = thinker.generate(
        **inputs,
        **({"use_audio_in_video": True} if heard else {}),
        max_new_tokens=TOKENS,
        eos_token_id=config.im_end_token_id,
        do_sample=False,
        output_hidden_states=True,
        output_logits=True,
        return_dict_in_generate=True,
    )
    made["tokens"] = out.sequences[0, len(ids) :].numpy().astype(np.int32)
    prefill = out.hidden_states[0]
    row = torch.tensor(ids)
    starts = torch.where(row == config.im_start_token_id, torch.arange(len(ids)), 0).cummax(0).values
    t = config.thinker_config
    pads = torch.isin(row, torch.tensor([t.audio_token_id, t.image_token_id, t.video_token_id]))
    handed = pads & (row[(starts + 1).clamp(max=len(ids) - 1)] == config.user_token_id)
    made["hidden"] = prefill[config.talker_config.accept_hidden_layer][0, handed].numpy()
    made["state"] = prefill[-1][0, -1].numpy()
    made["logits"] = out.logits[0][0].numpy()
    return made


def _towers(call: Any, inputs: Any, pixels: str, grids: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    if pixels not in inputs:
        return []
    out = call(inputs[pixels], inputs[grids])
    sizes = [len(rows) for rows in out.pooler_output]
    deep = torch.stack(list(out.deepstack_features)).split(sizes, dim=1)
    return list(zip(out.pooler_output, deep, strict=True))


def run_processors(processor: Any) -> dict[str, np.ndarray]:
    made: dict[str, np.ndarray] = {}
    for n in (640, 4321, 16000, 50000):
        features = processor.feature_extractor(
            recording(n, 7), sampling_rate=16000, padding=True, truncation=False, return_attention_mask=True
        )
        mask = np.asarray(features["attention_mask"])[0]
        made[f"mel_{n}"] = np.asarray(features["input_features"])[0][::10].astype(np.float32)
        assert mask.sum() == n // 160 == made[f"mel_{n}"].shape[1]
    for height, width in ((32, 32), (100, 150), (20, 300), (700, 500), (33, 47)):
        out = processor.image_processor(picture(height, width, 8), return_tensors="pt")
        made |= _patches(out, f"image_{height}x{width}", "pixel_values", "image_grid_thw")
    size = {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32}
    for frames, height, width in ((1, 400, 300), (4, 64, 80), (5, 1200, 900)):
        out = processor.video_processor(film(frames, height, width, 9), size=size, return_tensors="pt")
        made |= _patches(out, f"film_{frames}x{height}x{width}", "pixel_values_videos", "video_grid_thw")
    return made


def _patches(out: Any, name: str, pixels: str, grid: str) -> dict[str, np.ndarray]:
    """Every so many patches; and of all, the sum of each, which misses no patch."""
    values = out[pixels].float()
    some = torch.linspace(0, len(values) - 1, 8).long()
    return {
        name: values[some].numpy(),
        f"sums_{name}": values.double().sum(1).float().numpy(),
        f"grid_{name}": out[grid][0].numpy(),
    }


def main() -> None:
    torch.set_num_threads(1)
    GOLDEN.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(folder)
        model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        processor = AutoProcessor.from_pretrained(folder)
        for name, case in CASES.items():
            keep(f"thinker_{name}", run(model, processor, case))
        keep("processors", run_processors(processor))
    versions = {package: importlib.metadata.version(package) for package in PACKAGES}
    content = {"made_with": versions, "tokens": TOKENS, "cases": CASES}
    (GOLDEN / "cases.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")


def keep(name: str, made: dict[str, np.ndarray]) -> None:
    np.savez_compressed(GOLDEN / f"{name}.npz", **dict(sorted(made.items())))
    size = (GOLDEN / f"{name}.npz").stat().st_size / 1000
    print(f"{time.process_time():6.1f} s {size:6.0f} kB  {name}  ", end="")
    print("  ".join(f"{k}{list(v.shape)}" for k, v in made.items()), flush=True)
    if "tokens" in made:
        print(f"{'':10}{made['tokens'].tolist()}", flush=True)


if __name__ == "__main__":
    main()
