"""Settings on a command line, whatever their spelling."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legroom.records.loader_settings_and_flags import Flag, training_flags


def values(command: str) -> dict[str, str]:
    return {name: flag.value for name, flag in training_flags(shlex.split(command)).items()}


@pytest.mark.parametrize(
    ("words", "name", "spelling", "value"),
    [
        ("--batch 4", "batch", "--batch", "4"),
        ("--batch_size 4", "batch", "--batch_size", "4"),
        ("--batch-size=4", "batch", "--batch-size", "4"),
        ("-b 4", "batch", "-b", "4"),
        ("-b4", "batch", "-b", "4"),
        ("-b=4", "batch", "-b", "4"),
        ("--global_batch_size 4", "batch", "--global_batch_size", "4"),
        ("--per_device_train_batch_size 4", "batch", "--per_device_train_batch_size", "4"),
        ("--batch_size_per_gpu=4", "batch", "--batch_size_per_gpu", "4"),
        ("--data.batch_size=4", "batch", "--data.batch_size", "4"),
        ("data.batch_size=4", "batch", "data.batch_size", "4"),
        ("+data/loader.batch_size=4", "batch", "data/loader.batch_size", "4"),
        ("SOLVER.IMS_PER_BATCH 16", "batch", "SOLVER.IMS_PER_BATCH", "16"),
        ("--batch auto", "batch", "--batch", "auto"),
        ("--batch -1", "batch", "--batch", "-1"),
        ("--num_workers 4", "workers", "--num_workers", "4"),
        ("--num-workers=0", "workers", "--num-workers", "0"),
        ("--workers 4", "workers", "--workers", "4"),
        ("-j 4", "workers", "-j", "4"),
        ("-j4", "workers", "-j", "4"),
        ("--dataloader_num_workers 4", "workers", "--dataloader_num_workers", "4"),
        ("data.num_workers=4", "workers", "data.num_workers", "4"),
        ("DATALOADER.NUM_WORKERS 4", "workers", "DATALOADER.NUM_WORKERS", "4"),
        ("--prefetch_factor 4", "prefetch", "--prefetch_factor", "4"),
        ("--dataloader-prefetch-factor 4", "prefetch", "--dataloader-prefetch-factor", "4"),
        ("--accum_iter 4", "accumulation", "--accum_iter", "4"),
        ("--gradient_accumulation_steps 4", "accumulation", "--gradient_accumulation_steps", "4"),
        ("--accumulation 4", "accumulation", "--accumulation", "4"),
        ("trainer.accumulate_grad_batches=4", "accumulation", "trainer.accumulate_grad_batches", "4"),
        ("--pin_memory", "pin_memory", "--pin_memory", "true"),
        ("--pin-mem --lr 1", "pin_memory", "--pin-mem", "true"),
        ("--pin_memory false", "pin_memory", "--pin_memory", "false"),
        ("--pin_memory train.h5", "pin_memory", "--pin_memory", "true"),
        ("--dataloader_pin_memory=False", "pin_memory", "--dataloader_pin_memory", "False"),
        ("--no-pin-memory", "pin_memory", "--no-pin-memory", "false"),
        ("--no_pin_mem", "pin_memory", "--no_pin_mem", "false"),
        ("--image_size 256", "image_size", "--image_size", "256"),
        ("imgsz=640", "image_size", "imgsz", "640"),
        ("--max_seq_len 512", "sequence_length", "--max_seq_len", "512"),
        ("--max_seq_length=512", "sequence_length", "--max_seq_length", "512"),
        ("--epochs=90", "epochs", "--epochs", "90"),
        ("--num_train_epochs 3", "epochs", "--num_train_epochs", "3"),
    ],
)
def test_spellings(words: str, name: str, spelling: str, value: str) -> None:
    command = ["python", "train.py", "--data", "x.h5", *words.split(), "--seed", "1"]
    assert training_flags(command) == {name: Flag(spelling, value, 4)}


@pytest.mark.parametrize(
    "words",
    ["--batches 4", "--b 4", "-B 4", "b=4", "--batch", "--batch=", "--batch --lr 3", "--eval_batch_size 4",
     "--batch_norm 1", "preprocessing_num_workers=4", "data.workers many", "SEED 4", "--network 3"],
)  # fmt: skip
def test_what_is_none(words: str) -> None:
    assert training_flags(["python", "train.py", *words.split()]) == {}


def test_of_one_spelling_given_twice_the_last_counts() -> None:
    assert values("python t.py --batch-size 4 --batch_size 8") == {"batch": "8"}


def test_what_one_process_loads_is_preferred_to_the_sum_of_all() -> None:
    for command in ("--global_batch_size 512 --micro_batch_size 4", "--micro_batch_size 4 --global_batch_size 512"):
        assert values(f"python t.py {command}") == {"batch": "4"}


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python train.py --batch 4", {"batch": "4"}),
        ("/usr/bin/python3.11 -u -X dev -W error train.py --batch 4", {"batch": "4"}),
        ("python -b -m pkg.train --batch 4", {"batch": "4"}),
        ("python -b train.py", {}),
        ("python -c 'batch=4' --epochs 3", {"epochs": "3"}),
        ("train --batch 4", {"batch": "4"}),
        ("torchrun --nproc_per_node 8 train.py --batch 4", {"batch": "4", "ranks": "8"}),
        ("torchrun --nproc-per-node=gpu -m pkg.train --batch 4", {"batch": "4", "ranks": "gpu"}),
        ("/v/bin/python /v/bin/torchrun --nnodes 2 --nproc_per_node=8 train.py -j 3", {"workers": "3", "ranks": "8"}),
        ("python -m torch.distributed.run --nproc_per_node 2 train.py --batch 4", {"batch": "4", "ranks": "2"}),
        ("accelerate launch --num_processes 4 --mixed_precision bf16 t.py --batch 1", {"batch": "1", "ranks": "4"}),
        ("python -m accelerate.commands.launch --num_processes=4 t.py", {"ranks": "4"}),
        ("deepspeed --num_gpus 4 train.py --deepspeed ds.json --batch 4", {"batch": "4", "ranks": "4"}),
        ("mpirun -np 4 python train.py --batch 4", {"batch": "4", "ranks": "4"}),
        ("srun --ntasks-per-node=8 -c 4 python -u train.py --batch 4", {"batch": "4", "ranks": "8"}),
        ("env OMP_NUM_THREADS=1 batch=9 numactl -N 0 python train.py --batch 4", {"batch": "4"}),
        ("torchrun --nproc_per_node 2 --no-python mytrain --batch 4", {"batch": "4", "ranks": "2"}),
        # A script's own flag of a launcher's name is the script's.
        ("python train.py --num_processes 3", {}),
        ("python", {}),
        ("torchrun", {}),
    ],
)  # fmt: skip
def test_launchers(command: str, expected: dict[str, str]) -> None:
    assert values(command) == expected


def test_a_process_that_renamed_itself_is_one_word() -> None:
    assert {k: v.value for k, v in training_flags(["python train.py --batch 4 -j8"]).items()} == {
        "batch": "4",
        "workers": "8",
    }


def test_an_empty_command_line_has_none() -> None:
    assert training_flags([]) == {}


WORDS = st.one_of(
    st.sampled_from(
        shlex.split(
            "python torchrun accelerate launch train.py -m -c -u -b -j --batch --num_workers=2 data.num_workers=4 "
            "--pin_memory --no_pin_mem --nproc_per_node 4 -b8 SOLVER.IMS_PER_BATCH true --epochs= ="
        )
    ),
    st.text(max_size=8),
)


@given(st.lists(WORDS, max_size=12))
def test_every_flag_can_be_found_again_in_the_words(words: list[str]) -> None:
    given_words = words[0].split() if len(words) == 1 and " " in words[0] else words
    for name, flag in training_flags(words).items():
        here, following = given_words[flag.at], given_words[flag.at + 1 : flag.at + 2]
        assert flag.spelling in here
        if name == "pin_memory":
            assert flag.value
        else:
            assert here.endswith(flag.value) or following == [flag.value]
