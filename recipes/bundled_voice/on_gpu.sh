#!/bin/bash
# Everything that wants a GPU, in one go: teachers on most CPU cores; on one GPU the encoder, then
# the decoder and the talker side by side on its codes.
#
#   on_gpu.sh MODELS JOBS TOKENIZER WORK ENCODER_SECONDS SECONDS
#
# ENCODER_SECONDS train encoder and codebooks (0: take WORK/encoder/codec.pt as it is), then decoder
# and talker have SECONDS. A stage that fails, or whose log stands still for STALL seconds, is started
# again from its files, the second time without CUDA graphs. Rerun with the same WORK and 0 to go on.
# Settings (environment): CORES, the cores to use, "12-31"; OWN, how many of them are the training's;
# FEEDERS, how many processes make the talker's rows; VOICES; STAGES, "decoder talker" or one of them; DEVICE and DECODER_DEVICE; REHEARSE=1, try decoder and talker for a few steps while the encoder still learns;
# KEEP, a folder that always holds the newest small copies (checkpoint.py), in case the machine goes
# away; ENCODER_ARGS, DECODER_ARGS, TALKER_ARGS; SMALL (--tiny).
set -u
models=$(realpath "$1") jobs=$(realpath "$2") tokenizer=$(realpath "$3") work=$(realpath -m "$4")
now() { date +%s; }
begin=$(now) middle=$(($(now) + $5)) end=$(($(now) + $5 + $6))
here=$(cd "$(dirname "$0")" && pwd)
stages=${STAGES:-decoder talker}
cores=${CORES:-0-$(($(nproc) - 1))}
from=${cores%-*} to=${cores#*-}
own=${OWN:-$((to - from > 8 ? 4 : 1))}  # the training loops launch kernels: they need cores of their own
workers=$((to - from + 1 - own)); [ $workers -gt 0 ] || workers=1
export PYTHONPATH=$here PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
device=${DEVICE:-$(python3 -c 'import torch; print("cuda:0" if torch.cuda.is_available() else "cpu")')}
mkdir -p "$work/rows" "$work/speech" "$work/encoder" "$work/codec" "$work/talker" "$work/rehearsal"
cd "$here"
loop() { exec taskset -c "$from-$((own + from - 1))" python3 "$@" --device "$device" ${SMALL:-}; }
keep() { [[ $stages != *$3* ]] || [ -z "${KEEP:-}" ] || ! [ -f "$2/$1.pt" ] || timeout 60 python3 checkpoint.py shrink "$1" "$2" "$KEEP" >> "$work/keep.log" 2>&1; }

stage() {  # stage NAME UNTIL SCRIPT ARGS...
    local name=$1 until=$2 log=$work/$1.log plain="" version pid code device=$device; shift 2
    while [ $((until - $(now))) -gt 15 ]; do
        version=$(cat "$here"/*.py | md5sum)
        echo "== $name from $(($(now) - begin)) s, PLAIN=$plain" >> "$log"
        (export PLAIN=$plain; loop "$@" --seconds $((until - $(now)))) >> "$log" 2>&1 &
        pid=$!; echo $pid > "$work/$name.pid"
        while kill -0 $pid 2> /dev/null; do
            sleep 1
            if [ $(($(now) - $(stat -c %Y "$log"))) -gt "${STALL:-100}" ] || [ "$(now)" -gt $((until + 25)) ]; then
                echo "== $name stopped: no word for long, or past its time" >> "$log"
                kill -9 $pid; break
            fi
        done
        wait $pid; code=$?
        [ $code = 0 ] && return 0
        echo "== $name ended with $code at $(($(now) - begin)) s" >> "$log"
        sleep 2
        if [ "$version" = "$(cat "$here"/*.py | md5sum)" ]; then plain=1; else plain=""; fi
    done
    return 1
}

nice -n 10 taskset -c "$((workers > to - from ? from : from + own))-$to" python3 teachers.py speak "$jobs" "$models" "$work/speech" --voices "${VOICES:-heart,deep,bright}" \
    --workers "$workers" --shard 32 --seconds $(($5 + $6 * 9 / 10)) >> "$work/teachers.log" 2>&1 &

rehearse() {
    try() { timeout -k 5 80 taskset -c "$from-$((own + from - 1))" python3 "${@:2}" --device "$device" ${SMALL:-} 2>&1 | sed "s/^/$1: /"; }
    until [ -f "$work/encoder/codec.pt" ]; do sleep 1; [ "$(now)" -lt "$middle" ] || return; done
    cp "$work/encoder/codec.pt" "$work/rehearsal/"
    try feed talker.py feed "$work/speech" "$work/rehearsal" "$tokenizer" "$work/rehearsal/rows" --hours 4
    try talker talker.py train "$work/rehearsal/rows" "$work/rehearsal/talker" --seconds 20 --log 10 --check-every 10 --patience 5
    try decoder codec_train.py decoder "$work/speech" "$work/rehearsal/codec" --codec "$work/rehearsal" --seconds 25 --least 30 --adv-after 1 --log 10 --hours 4
    echo "rehearsal over at $(($(now) - begin)) s"
}
[ -z "${REHEARSE:-}" ] || rehearse > "$work/rehearsal.log" 2>&1 &
[ "$5" -gt 0 ] && stage encoder $middle codec_train.py encoder "$work/speech" "$work/encoder" --save-every 30 ${ENCODER_ARGS:-}
[ -f "$work/encoder/codec.pt" ] || { echo "no encoder: see $work/encoder.log"; exit 1; }
if [[ $stages == *decoder* ]]; then
    device=${DECODER_DEVICE:-$device} stage decoder $end codec_train.py decoder "$work/speech" "$work/codec" --codec "$work/encoder" ${DECODER_ARGS:-} &
fi
if [[ $stages == *talker* ]]; then
    for i in $(seq 0 $((${FEEDERS:-1} - 1))); do
        STALL=100000 stage feed$i $((end - 90)) talker.py feed "$work/speech" "$work/encoder" "$tokenizer" "$work/rows" --part $i ${FEEDERS:-1} &
    done
    stage talker $end talker.py train "$work/rows" "$work/talker" ${TALKER_ARGS:-} &
fi
while sleep 5; [ "$(now)" -lt $end ]; do
    if [ $((($(now) - begin) % 60)) -lt 5 ]; then keep talker "$work/talker" talker; keep codec "$work/codec" decoder; fi
done
for _ in $(seq 30); do [ "$(jobs -r | grep -c 'stage decoder\|stage talker')" -gt 0 ] || break; sleep 1; done
keep talker "$work/talker" talker
keep codec "$work/codec" decoder
echo "done after $(($(now) - begin)) s"
