. gpu/env.sh; mkdir -p /tmp/L; cp build/b/data.tar.xz /tmp/L; cat build/a/smollm2.gguf.0 build/b/smollm2.gguf.1 > /tmp/smollm2.gguf; date
timeout 300 python3 benchmarks/learning.py /tmp/L --stage data sft --gguf /tmp/smollm2.gguf --sft num_epochs=3 2>&1 | tail -n 40; date
cp /tmp/L/sft/metrics.jsonl $OUT/sft.jsonl
for x in 10:1e-5 11:3e-5 12:8e-5; do
timeout 200 python3 benchmarks/learning.py /tmp/L --stage grpo --seeds ${x%:*} --budget-minutes 1.8 --grpo learning_rate=${x#*:} eval_steps=8 > $OUT/pilot-${x%:*}.log 2>&1 &
done; wait; date; tail -n 3 $OUT/pilot-*.log
for s in 10 11 12; do cp /tmp/L/grpo-$s/metrics.jsonl $OUT/grpo-$s.jsonl; tail -n 4 /tmp/L/grpo-$s-grpo.log; done
python3 - <<'P'
import json
for s in (10,11,12):
    for l in open(f"/tmp/L/grpo-{s}/metrics.jsonl"):
        r=json.loads(l); print(s,r["step"],*(f"{k}={r[k]:.3g}" for k in ("reward","reward_task_completion","eval_task_completion","flat_groups","rollout_seconds","reward_seconds","update_seconds","tokens","norm","surprise","mismatch") if k in r))
P
