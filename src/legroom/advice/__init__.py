"""Decisions about memory: pure functions of records; nothing here reads the machine.

findings                      findings: descriptors, disk, CPU quota, GPUs, RAM, swap; all of them in order
findings_shm                  findings about /dev/shm
findings_copy_on_write        whether forked workers copy the dataset, and what to do about it
fix_commands                  fixes for a finding in this environment: what to type, and how to verify it
job_settings_to_workload      arguments of a job, checked: DataLoader settings, ranks, model; bytes per batch
memory_need                   what a workload needs of each memory pool, predicted or measured in a trial run
fit_on_machine                whether a need fits, and how many jobs; what is given up until it does; sizes for /dev/shm
config_snippets_for_shm_size  a size of /dev/shm as docker, compose, kubernetes, slurm or fstab configuration
choose_settings               settings that fit without knowing the dataset (doctor), or for a measured one (tune)
explain_settings              the complete settings record, one reason per setting, further options
zero_and_deepspeed            ZeRO memory, and DeepSpeed and accelerate configuration files
"""
