"""Signals that are heard in another way for a while."""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)  # those that ask a program to save and end

Handler = Callable[[int, FrameType | None], None] | signal.Handlers


@contextmanager
def heard_by(handler: Handler, signals: Sequence[signal.Signals] = STOP_SIGNALS) -> Iterator[None]:
    """As long as the block runs, `handler` gets the signals.

    Those that this process ignores stay ignored, as under nohup; and all stay as they are in a
    thread other than the main one, which may not set handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = [number for number in signals if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heard}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)
