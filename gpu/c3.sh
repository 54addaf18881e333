. gpu/env.sh; date
timeout 560 python3 benchmarks/learning.py /tmp/L --stage grpo measure --parallel --seeds 0 1 2 --budget-minutes ${1:-4} --grpo $2 2>&1 | tail -n 40; date
cp /tmp/L/out/* $OUT/ 2>/dev/null || for s in 0 1 2; do cp /tmp/L/grpo-$s/metrics.jsonl $OUT/m-$s.jsonl; done; tail -n 3 /tmp/L/*-measure.log
