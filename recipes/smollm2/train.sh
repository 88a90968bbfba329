#!/usr/bin/env bash
# Train drafts for SmolLM2-135M-Instruct: a model, an EAGLE-3 head. Every step resumes where it was cut.
#
#     recipes/smollm2/train.sh DATA FOLDER [PROMPTS] [STEPS]
#
# DATA: see prompts.py. FOLDER gets the target's outputs (logs) and a folder for each draft. PROMPTS: that many of the
# training prompts of each kind, 800. STEPS: of training, 800 (of 2,560 tokens).
set -euo pipefail
data=$1 folder=$2 num_prompts=${3:-800} steps=${4:-800}
here=$(dirname "$(realpath "$0")")
target=$(python "$here/../../benchmarks/real_models.py" smollm2 | tail -1 | python -c 'import json, sys; print(json.load(sys.stdin)["smollm2"])')

python "$here/prompts.py" "$data" "$folder/prompts" "$num_prompts"
mkdir -p "$folder/logs" "$folder/drafts"

log() { # KIND-PART TEMPERATURE OPTIONS...
    local name=$1 temperature=$2
    shift 2
    outrider generate --target "$target" --draft none --prompts "$folder/prompts/$name.jsonl" -t "$temperature" \
        --batch-size 16 --output "$folder/logs/$name-t$temperature.jsonl" "$@"
}
for temperature in 0 1; do
    log chat-held-out "$temperature" --chat -n 128 --seed 2 --probs
    log text-held-out "$temperature" -n 128 --seed 2 --probs
done
log chat-train 1 --chat -n 256 --seed 1
log text-train 1 -n 256 --seed 1 --ignore-eos
log chat-train 0 --chat -n 256 --seed 1

train() { # NAME OPTIONS...
    local name=$1
    shift
    outrider distill "$target" --output "$folder/drafts/$name" --length 320 --batch-size 8 --seed 0 \
        --written-from "$folder/logs/chat-train-t1.jsonl" --written-from "$folder/logs/chat-train-t0.jsonl" \
        --written-from "$folder/logs/text-train-t1.jsonl" --steps "$steps" --learning-rate 1e-3 --patience 20 "$@"
}
train eagle3 --kind eagle3 --draft-vocab 4096 --depth 3
train model --layers 1 --draft-vocab 4096
