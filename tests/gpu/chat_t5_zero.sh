#!/usr/bin/env bash
# chat_t5 under ZeRO 2 on one device: both launch forms, a kill, a resume. Prints OK / FAILED lines.
#   bash tests/gpu/chat_t5_zero.sh            on a CUDA machine
#   DS_ACCELERATOR=cpu LIMIT=600 bash tests/gpu/chat_t5_zero.sh   without one
# Needs importable: torch, accelerate, transformers, pyarrow, deepspeed, and what legroom needs. PYTHON names the python.
set -u
here=$(cd "$(dirname "$0")/../.." && pwd)
example=$here/examples/chat_t5
python=${PYTHON:-python3}
limit=${LIMIT:-120} # seconds for each training
export PYTHONPATH=$here/src${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} PYTHONUNBUFFERED=1
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
"$python" -c "import deepspeed" 2> /dev/null || { echo "skipped: DeepSpeed cannot be imported"; exit 0; }
work=$(mktemp -d) && cd "$work" || exit 1
bad=0
ok() { echo "OK     $1 (${SECONDS} s)"; }
failed() { bad=1; echo "FAILED $1 (${SECONDS} s)"; [ -n "${2:-}" ] && { echo "------ last lines of $2"; tail -25 "$2"; echo "------"; }; }
check() { if eval "$2"; then ok "$1"; else failed "$1" "${3:-}"; fi; }

"$python" - <<'P' || { echo "FAILED imports"; exit 1; }
import accelerate, deepspeed, torch, transformers, sys
print("python", sys.version.split()[0], "torch", torch.__version__, "accelerate", accelerate.__version__,
      "transformers", transformers.__version__, "deepspeed", deepspeed.__version__,
      "on", torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu")
P
"$python" "$example/make_data.py" --out data --rows 1024 > data.txt 2>&1
check "the data is made" '[ -s data/train.parquet ]' data.txt

# The example's files are for three ranks: here for one.
sed 's/num_processes: 3/num_processes: 1/' "$example/accelerate_config_deepspeed.yaml" > one.yaml
sed 's/"train_batch_size": 192/"train_batch_size": 64/' "$example/ds_config_zero2.json" > one.json
few=(train --epochs 2 --save_steps 3 --logging_steps 1 --eval_rows 8 --seed 1 --ultra_low_mem False --num_workers 0
     --pin_memory False --width 32)
folders() { echo --ckpt_dir "$1/checkpoints" --model_dir "$1/model" --log_dir "$1/logs"; }

# 1. accelerate's own file
timeout "$limit" "$python" -m accelerate.commands.launch --config_file one.yaml \
    "$example/train_low_mem.py" "${few[@]}" $(folders yaml) > yaml.txt 2>&1
status=$?
check "launched by accelerate's file, exit status $status" "[ $status = 0 ]" yaml.txt
check "all epochs are done" 'grep -q "all epochs are done: 2" yaml.txt'
check "ZeRO's own states are in the checkpoint" 'ls yaml/checkpoints/zero-*/pytorch_model/*optim_states.pt > /dev/null'

# 2. DeepSpeed's file, given to the script
timeout "$limit" "$python" -m accelerate.commands.launch --num_processes 1 --mixed_precision bf16 \
    "$example/train_low_mem.py" "${few[@]}" --deepspeed one.json $(folders json) > json.txt 2>&1
status=$?
check "launched with --deepspeed FILE, exit status $status" "[ $status = 0 ]" json.txt
check "all epochs are done" 'grep -q "all epochs are done: 2" json.txt'
check "ZeRO's own states are in the checkpoint" 'ls json/checkpoints/zero-*/pytorch_model/*optim_states.pt > /dev/null'

# 3. killed after a save amid the first epoch, and gone on with
"$python" -m accelerate.commands.launch --config_file one.yaml \
    "$example/train_low_mem.py" "${few[@]}" $(folders killed) > killed.txt 2>&1 &
launcher=$!
until grep -q "step: 5/" killed.txt 2> /dev/null || ! kill -0 $launcher 2> /dev/null || [ $((SECONDS)) -gt $((limit * 4)) ]; do
    sleep 0.02
done
for rank in $(pgrep -P $launcher); do kill -9 "$rank" 2> /dev/null; done
wait $launcher
status=$?
check "killed amid an epoch, exit status $status" "[ $status != 0 ] && ! grep -q 'epochs are done' killed.txt" killed.txt
check "a checkpoint is there" '[ -s killed/checkpoints/last.pt ]'
timeout "$limit" "$python" -m accelerate.commands.launch --config_file one.yaml \
    "$example/train_low_mem.py" "${few[@]}" --is_keep_training=True $(folders killed) > resumed.txt 2>&1
status=$?
check "resumed, exit status $status" "[ $status = 0 ]" resumed.txt
check "it resumed from the checkpoint: $(grep -o 'resumes from.*' resumed.txt)" 'grep -q "resumes from.*step [1-9]" resumed.txt'
check "all epochs are done" 'grep -q "all epochs are done: 2" resumed.txt'
"$python" - > same.txt 2>&1 <<'P'
from safetensors.torch import load_file
kept, whole = (load_file(f"{name}/model/model.safetensors") for name in ("killed", "yaml"))
most = max((kept[name].float() - whole[name].float()).abs().max().item() for name in whole)
largest = max(part.float().abs().max().item() for part in whole.values())
same = all((kept[name] == whole[name]).all() for name in whole)
print("bit by bit the same" if same else f"not the same: they differ by {most:.3g} at most, the largest weight is {largest:.3g}")
assert most <= 0.02 * largest
P
status=$?
check "killed and resumed against never killed: $(tail -1 same.txt)" "[ $status = 0 ]" same.txt
echo "weights after form 1, form 2, resume (last losses):"
for name in yaml json resumed; do grep -o "epoch: 1, step: 16/16.*" $name.txt; grep "Adafactor's states" $name.txt; done

cd / && rm -rf "$work"
[ $bad = 0 ] && echo "OK     all of it in $SECONDS s" || echo "FAILED some of it, see above ($SECONDS s)"
exit $bad
