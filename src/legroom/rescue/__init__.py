"""Supervise a training job: diagnose why it failed and retry with lower settings.

Files:
    supervisor                 attempts in a row: run, diagnose, restart with lower settings
    job_attempt                one attempt from start to evidence and verdict; stop a job that hangs on a full /dev/shm
    find_command               the program that a command names, or why it cannot be run
    job_process                the job's process, its terminal, signals and output; inject Legroom into its Python
    cgroup_and_oom_victims     the job's own memory cgroup, its OOM counter; which process an OOM kill took; kernel log
    job_sampling               samples of the job's memory pools while it runs, its idle time; alarms; which files in
                               /dev/shm are its own, and the removal of leftovers
    failure_message_patterns   table of failure messages of Python, torch, CUDA, schedulers, kernels
    read_log_file              read the end of a log file or a pipe; refuse what is no log
    find_failures_in_log       failure messages and tracebacks at the end of a log; which of them count
    log_lines_without_failure  lines that report no failure: quoted messages, training steps, a successful end
    verdict                    which memory pool ran out, and the fixes
    verdict_from_exit          rules on OOM counters, swapping, signals and exit statuses
    verdict_from_log           rules on what the program printed: an error names what ran out; bus errors
    retry_settings             find settings on a command line, choose what to lower for the next attempt, rewrite them
    newest_checkpoint          the newest complete checkpoint
    run_report                 the report as JSON and HTML
    inject/                    sitecustomize that replaces torch's DataLoader or limits GPU memory
"""
