export PYTHONPATH=/tmp/site:$PWD/src:$PWD/tests:$PWD/benchmarks HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
