mkdir -p /tmp/site; for w in carry/*.whl; do python3 -m zipfile -e $w /tmp/site; done
. gpu/env.sh; date
timeout 70 python3 carry/step.py > $OUT/step.log 2>&1; head -c 4500 $OUT/step.log; date
T="timeout 100 python3 -m pytest -q -o addopts= -p no:cacheprovider --tb=short"
$T tests/test_shared_prompt.py -k "cuda or gpu or flash or CUDA" > $OUT/t1.log 2>&1 &
$T tests/test_learner_gpu.py -k "shar or prompt" > $OUT/t2.log 2>&1 &
$T tests/test_grpo_gpu.py > $OUT/t3.log 2>&1 &
wait; tail -n 25 $OUT/t?.log; date
