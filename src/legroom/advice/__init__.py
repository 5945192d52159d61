"""Decisions about memory: pure functions of records; nothing here reads the machine.

findings          findings about a machine: descriptors, disk, CPU quota, GPUs; all of them in order
findings_shm      findings about /dev/shm
findings_ram      findings about RAM, cgroup limits, swap and pressure
remedies          fixes for a finding in this environment: what to type, and how to verify it
plan_inputs       what a job is given as: batch bytes, DataLoader settings, ranks
memory_need       what a workload takes from each memory pool, predicted or measured in a trial
fit               whether a need fits a machine, the largest settings that fit, sizes for /dev/shm
plan              the need of N jobs per GPU: sizes, a table, how many fit
shm_config        a size of /dev/shm as docker, compose, kubernetes, slurm or fstab configuration
safe_settings     DataLoader settings that fit without knowing the dataset, for `doctor`
recommend         DataLoader settings for a measured dataset
explain_settings  one reason per setting, further options, and the complete settings record
launcher_config   ZeRO memory, and DeepSpeed and accelerate configuration files
"""
