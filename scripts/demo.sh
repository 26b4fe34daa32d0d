#!/bin/sh
# What `make run` shows: the machine, a decode batch of a real model checked against the oracle, and
# the model writing text through libmla.
set -eu
mla=$1
root=$(cd "$(dirname "$0")/.." && pwd)
model=$root/models/kjv-mla-6m
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

say() { printf '\n== %s\n' "$*"; }

say "What this machine has"
"$mla" info

say "A decode batch of the model, written to a file, decoded, and checked against the oracle"
"$mla" generate --model "$model" --prompt "In the beginning God" --prompt "The LORD is my shepherd;" \
  --max-tokens 48 --dump-batch "$scratch/batch.safetensors" >/dev/null
"$mla" run --input "$scratch/batch.safetensors" --output "$scratch/result.safetensors"
"$mla" check --input "$scratch/batch.safetensors" --backend all

say "The model, decoding two prompts as one batch from a paged bf16 latent cache"
"$mla" generate --model "$model" --prompt "In the beginning God" --prompt "The LORD is my shepherd;" \
  --max-tokens 200
