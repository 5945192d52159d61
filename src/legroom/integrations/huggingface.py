"""A callback for Hugging Face's Trainer: ``Trainer(callbacks=[LegroomCallback()])``.

Forwards the Trainer's events to the guard (guard/), writes alarms into the log history, and requests the
Trainer's own checkpoint. A callback cannot reach the Trainer's reporters: set ``callback.log = trainer.log`` to send
them alarms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from legroom.integrations.guard import Guard
from legroom.messages import phrase
from legroom.system.lazy_and_optional_imports import require


class Events:
    """A TrainerCallback: watches memory, tunes at every epoch, saves a checkpoint before memory runs out."""

    log: Callable[[dict[str, float]], object] | None = None

    def __init__(self, **options: Any) -> None:
        """Create the callback.

        Args:
            **options: Those of ``legroom.integrations.guard.Guard``.
        """
        self.guard = Guard(**options)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        logging = require("transformers.utils.logging", "", phrase("this callback"), package="transformers")
        self.guard.logger = logging.get_logger("transformers.legroom")
        self.guard.main = state.is_local_process_zero
        self.guard.report = lambda numbers: self._report(state, numbers)
        self.guard.start()
        self.guard.model_ready()  # the Trainer has moved it to its device by now

    def on_epoch_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:
        self.guard.epoch(int(state.epoch or 0), train_dataloader, args.gradient_accumulation_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        if self.guard.step() is not None:
            control.should_save = True
        return control

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.guard.end()

    def _report(self, state: Any, numbers: Mapping[str, float]) -> None:
        if self.log is not None:
            self.log(dict(numbers))  # also writes the history
        else:
            state.log_history.append({**numbers, "epoch": state.epoch, "step": state.global_step})


@cache
def _callback_class() -> type[Any]:
    module = require("transformers", "", phrase("this callback"), package="transformers")
    names = {"__module__": __name__, "__qualname__": "LegroomCallback", "__doc__": Events.__init__.__doc__}
    return type("LegroomCallback", (Events, module.TrainerCallback), names)


def __getattr__(name: str) -> Any:
    if name == "LegroomCallback":
        return _callback_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
