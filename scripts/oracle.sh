#!/usr/bin/env bash
# Makes .venv-oracle, the separate environment of the reference implementations that the slow tests
# and the benchmarks compare against. torch is named so that the CPU wheel of our own version is taken.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-.venv/bin/python}"
[ -d .venv-oracle ] || "$python" -m venv .venv-oracle
.venv-oracle/bin/python -m pip install --quiet "torch==${TORCH_VERSION:-2.13.0}" mergekit==0.1.5
.venv-oracle/bin/python -c 'import mergekit, torch; print("oracle ready, torch", torch.__version__)'
