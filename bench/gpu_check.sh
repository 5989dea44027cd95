#!/usr/bin/env bash
# Proves the CUDA path where a GPU is at hand: at most 6 minutes, one block of figures.
#
#     bash bench/gpu_check.sh [PYTHON]
#
# PYTHON is an interpreter with Seedance's requirements and `.[dev]`; by default that of .venv, else
# python3. Exits 0 when all is well, 1 when a test fails or a text differs from the CPU's, 2 where
# there is no GPU, 124 when it takes too long.
set -u
cd "$(dirname "$0")/.." || exit 1

python=${1:-}
if [ -z "$python" ]; then
  if [ -x .venv/bin/python ]; then python=.venv/bin/python; else python=python3; fi
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export TQDM_DISABLE=1

if ! "$python" -c 'import torch' 2>/dev/null; then
  echo "gpu check: $python has no torch: name an interpreter that has Seedance's requirements"
  exit 1
fi
if ! "$python" -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else 1)'; then
  echo "gpu check: no GPU: torch sees no CUDA device, so nothing was checked"
  exit 2
fi

echo "gpu check: $(date -u +%FT%TZ)"
"$python" -c 'import platform, torch
print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}, "
      f"Python {platform.python_version()}")'
timeout 120 "$python" -m pytest -q -p no:cacheprovider -m gpu tests/engine/test_cuda.py
status=$?
timeout 220 "$python" -m bench.gpu_check
figures=$?
if [ "$status" -eq 0 ]; then status=$figures; fi
if [ "$status" -eq 0 ]; then echo "gpu check: passed"; else echo "gpu check: FAILED ($status)"; fi
case $status in 0 | 124) exit "$status" ;; *) exit 1 ;; esac
