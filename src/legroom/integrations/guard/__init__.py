"""What every adapter does for a training run: watch memory, tune at each epoch, log, ask for a checkpoint in time.

training_run_hooks             Guard: called when a run starts, an epoch begins, a step is done, the run ends
checkpoint_schedule            decide when a checkpoint is due: which alarm is urgent, and when it asks again
retune_loader                  choose settings for a DataLoader that exists, and change it between epochs
loader_prepared_by_accelerate  the DataLoader in accelerate's wrapper; give a rebuilt one its share= again
epoch_memory_log               memory at moments of a run, and the log message of an epoch
"""

from __future__ import annotations

from legroom.integrations.guard.training_run_hooks import Guard

__all__ = ["Guard"]
