"""In which order test files begin when several processes share them.

A long file that began last would keep one process busy while the others have nothing left to do.
"""

from __future__ import annotations

# Longest first. tests/unit/test_changed.py checks that each exists.
LONG = (
    # Short, but it measures pages of the test process itself, in which thousands of tests have freed memory later.
    "test_probe_copy_on_write.py",
    "test_leak_loops.py",
    "test_dataloader_share_group.py",
    "test_docs_blocks.py",
    "test_leak_processes.py",
    "test_dataloader_orphaned_workers.py",
    "test_cache_faults.py",
    "test_cli_check.py",
    "test_example_many.py",
    "test_cli_run.py",
    "test_example_glint.py",
    "test_loader_measure.py",
    "test_contract_dataloader.py",
    "test_cli_tune.py",
    "test_dataloader.py",
    "test_cache_fuzz.py",
    "test_remote_open.py",
    "test_cache_freeze.py",
    "test_integrations_deepspeed.py",
    "test_cache_source_changes.py",
    "test_gpu_oom_retry.py",
    "test_cli_escapes.py",
    "test_tune.py",
    "test_formats_fuzz.py",
    "test_gpu_batch_size.py",
    "test_formats.py",
    "test_monitor_trend.py",
    "test_integrations_lightning.py",
    "test_integrations_huggingface.py",
    "test_dataloader_explain_worker_crash.py",
    # rigs
    "test_real_deaths.py",
    "test_real_evidence.py",
    "test_real_dataloader.py",
    "test_real_rescue.py",
    "test_real_watch.py",
    "test_real_example_audio.py",
    "test_real_predict.py",
    "test_real_check.py",
    "test_real_batch_size.py",
    "test_real_dataloader_room.py",
    "test_real_demo.py",
    "test_real_example_chat.py",
    "test_real_tune.py",
)


def position(name: str) -> int:
    """Where a test file stands among the others; files of no known length keep their order."""
    return LONG.index(name) if name in LONG else len(LONG)
