. gpu/env.sh; date
timeout 150 python3 benchmarks/rollout.py --race ours ours-lora generate static --repeat 2 --out $OUT/decode.json 2>&1 | tail -n 6; date
timeout 170 python3 benchmarks/grpo.py /tmp/g --tokenizer carry/model --race ours trl --steps 6 --out $OUT/grpo.json 2>&1 | tail -n 6; date
timeout 120 python3 benchmarks/tool_rollout.py /tmp/g --tokenizer carry/model --repeat 1 --out $OUT/tool.json 2>&1 | tail -n 8; date
