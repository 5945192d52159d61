#!/bin/sh
# Two trainings at once, one for each loss, on one copy of the data. Afterwards the copy goes; where a training failed,
# it stays for the next try.
#
#     ./train_with_shm.sh [train_256.h5] [further flags of train_glint_unet.py …]
#
# PYTHON names the interpreter (default: python3). Models are written to the working directory.
set -eu

here=$(dirname "$0")
python=${PYTHON:-python3}
h5=${1:-train_256.h5}
[ $# -eq 0 ] || shift

train() {
    exec "$python" "$here/train_glint_unet.py" --h5 "$h5" --shared_memory "$@"
}

train "$@" --loss focal --model_path model_focal.pt &
focal=$!
train "$@" --loss hybrid --model_path model_hybrid.pt &
hybrid=$!
trap 'kill "$focal" "$hybrid" 2>/dev/null || true' EXIT
trap 'exit 130' INT # the shell keeps Ctrl-C from what runs in the background
trap 'exit 143' TERM

status=0
wait "$focal" || status=$?
wait "$hybrid" || status=$?
trap - EXIT INT TERM
[ "$status" -eq 0 ] || exit "$status"

"$python" "$here/shm_manager.py" --list --h5 "$h5"
"$python" "$here/shm_manager.py" --cleanup --h5 "$h5"
