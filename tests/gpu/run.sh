#!/usr/bin/env bash
# Check and measure everything that needs a GPU, in at most 8 minutes on one H200-class device:
#
#   tests/gpu/run.sh                      laws on CUDA, training steps of 5 B and 14 B geometry, encoders
#   tests/gpu/run.sh --section laws       one of laws, 5b, 14b, encoders; may be repeated
#   tests/gpu/run.sh --device cpu         the same script at a tiny size, to see that it runs (half a minute)
#   tests/gpu/run.sh --out figures.json   where the figures go, measured-on-DEVICE.json otherwise
#
# It installs nothing, as such machines are often without a network: PYTHON names an interpreter that has torch for
# CUDA and what pyproject.toml lists (python -m pip install -e '.[wan]'); diffusers only for the encoders. Weights are
# random and no file is read. It ends with status 1 if a law is broken or a section fails; the others still run.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3}
if ! reason=$("$python" -c 'import torch, jaxtyping, numpy, safetensors' 2>&1); then
    echo "$python lacks what wamlab needs ($(tail -n 1 <<<"$reason")): set PYTHON, or run $python -m pip install -e $root" >&2
    exit 2
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" "$root/tests/gpu/measure.py" "$@"
