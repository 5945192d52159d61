# torchrun waits for a second node that never joins, while /dev/shm is full of another process's files.
echo 'print("never")' > "$DEATH_DISK/rank.py"
exec "$PYTHON" -m torch.distributed.run --nnodes 2 --rdzv_backend c10d --rdzv_endpoint 127.0.0.1:0 --rdzv_id x \
    --rdzv_conf join_timeout=12 "$DEATH_DISK/rank.py"
