#!/bin/bash
# Everything that wants a GPU, in one go: teachers on most CPU cores, the codec on the first GPU,
# then the decoder (first GPU) and the talker (second GPU, or the same one) side by side.
#
#   on_gpu.sh MODELS JOBS TOKENIZER WORK CODEC_SECONDS SECONDS
#
# CODEC_SECONDS train the whole codec (0: keep WORK/codec/codec.pt's encoder as it is), then SECONDS
# train decoder and talker. Rerun with the same WORK to go on: each step resumes from its files.
# Settings (environment): VOICES and their WORKERS, "joe:16 jf_alpha:10"; AGAIN, seconds between
# new looks at what the teachers have said; KEEP, a folder that always holds the newest small copies
# of what was made (checkpoint.py), in case the machine goes away; CODEC_ARGS, DECODER_ARGS, TALKER_ARGS.
set -u
models=$(realpath "$1") jobs=$(realpath "$2") tokenizer=$(realpath "$3") work=$(realpath -m "$4") codec_s=$5 seconds=$6
here=$(cd "$(dirname "$0")" && pwd)
cores=$(nproc)
own=$((cores > 16 ? 6 : cores > 4 ? 4 : 1))  # the training loops launch small kernels: they need cores of their own
export PYTHONPATH=$here PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
second=${SECOND:-$(python3 -c 'import torch; print("cuda:1" if torch.cuda.device_count() > 1 else "cuda:0")')}
first=${FIRST:-cuda:0}
mkdir -p "$work/rows" "$work/speech"
cd "$here"
end=$(($(date +%s) + codec_s + seconds))
for part in ${VOICES:-joe:$((cores - own))}; do
    nice -n 10 taskset -c "$((own % cores))-$((cores - 1))" python3 teachers.py speak "$jobs" "$models" "$work/speech" --voices "${part%:*}" \
        --workers "${part#*:}" --shard 8 --seconds $((codec_s + seconds * 2 / 3)) >> "$work/teachers.log" 2>&1 &
done
loop() { taskset -c "0-$((own - 1))" python3 "$@"; }
keep() { [ -z "${KEEP:-}" ] || python3 checkpoint.py shrink "$@" "$KEEP" >> "$work/keep.log" 2>&1; }

if [ "$codec_s" -gt 0 ]; then
    loop codec.py train "$work/speech" "$work/codec" --device "$first" --seconds "$codec_s" --round --adv-after 99999 ${CODEC_ARGS:-} > "$work/codec.log" 2>&1
fi
mkdir -p "$work/codec_frozen" && cp "$work/codec/codec.pt" "$work/codec_frozen/"
keep codec "$work/codec_frozen"
left=$((end - $(date +%s)))
loop codec.py train "$work/speech" "$work/codec" --device "$first" --seconds "$left" --freeze --adv-after 0 --lr 4e-4 ${DECODER_ARGS:-} > "$work/decoder.log" 2>&1 &
tokenise() {
    python3 codec.py tokenise "$work/speech" "$work/codec_frozen" "$work/codes.$1.npz" --device "$second" --hours 40 ${SMALL:-} >> "$work/tokenise.log" 2>&1
    python3 talker.py build "$work/codes.$1.npz" "$tokenizer" "$work/rows/rows.$1.pt" --seed "$1" ${SMALL:-} >> "$work/tokenise.log" 2>&1
    [ -z "${KEEP:-}" ] || split -b 15M -d "$work/codes.$1.npz" "$KEEP/codes.npz."
}
tokenise 0
left=$((end - $(date +%s)))
loop talker.py train "$work/rows" "$work/talker" --device "$second" --seconds "$left" --save-every 45 ${TALKER_ARGS:-} > "$work/talker.log" 2>&1 &
talker=$!
for round in 1 2 3 4 5 6; do
    for _ in $(seq "${AGAIN:-90}"); do sleep 1; kill -0 $talker 2> /dev/null || break 2; done
    [ -f "$work/talker/talker.pt" ] && keep talker "$work/talker" --int8
    keep codec "$work/codec"
    [ $((end - $(date +%s))) -gt 100 ] && tokenise $round
done
wait $talker
keep talker "$work/talker" --int8
wait
keep codec "$work/codec"
