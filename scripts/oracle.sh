#!/usr/bin/env bash
# Makes .venv-oracle, the separate environment of the reference implementations that the slow tests
# and the benchmarks compare against. torch is named so that the CPU wheel of our own version is taken.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-.venv/bin/python}"
[ -d .venv-oracle ] || "$python" -m venv .venv-oracle
.venv-oracle/bin/python -m pip install --quiet "torch==${TORCH_VERSION:-2.13.0}" mergekit==0.1.5 trl==1.16.0
# The call checker alone is wanted of bfcl-eval: none of its dependencies, and not its data, which
# must never be read.
.venv-oracle/bin/python -m pip install --quiet --no-deps bfcl-eval==2026.3.23
.venv-oracle/bin/python -m pip install --quiet --no-deps pytrec-eval-terrier==0.5.11
rm -rf .venv-oracle/lib/python3*/site-packages/bfcl_eval/data
.venv-oracle/bin/python -c 'import mergekit, torch; print("oracle ready, torch", torch.__version__)'
