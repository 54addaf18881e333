#!/bin/sh
# Installs torch into the given Python and says which build came: CUDA where nvidia-smi answers, else CPU.
# usage: install_torch.sh PYTHON [INDEX_URL]
set -eu
cd "$(dirname "$0")/.."
python=$1
index=${2:-}
pip="$python -m pip --disable-pip-version-check install --quiet -c constraints.txt numpy"
version=2.13.0

if [ -n "$index" ]; then
  $pip "torch==$version" --index-url "$index"
elif command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi >/dev/null 2>&1; then
  $pip "torch==$version"
elif ! $pip "torch==$version+cpu" 2>/dev/null; then
  # Package indexes that carry only the default build give the CUDA libraries with it on Linux: it works on a CPU.
  echo "torch: no CPU build on your package index, installing the default build (large on Linux);" \
    "see README for the small one"
  $pip "torch==$version"
fi
"$python" - <<'PY'
import torch
build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
print(f"torch {torch.__version__}: {build} build, {'GPU in use' if torch.cuda.is_available() else 'no GPU in use'}")
PY
