"""What wakes the housekeeper."""

from __future__ import annotations

import threading


class Alarm:
    """Wakes the housekeeper where it sleeps long. `dozing`: whether it does."""

    __slots__ = ("_event", "dozing")

    def __init__(self) -> None:
        self.dozing = False
        self._event = threading.Event()

    def ring(self) -> None:
        """Something has begun that the housekeeper is to see to its end."""
        if self.dozing:
            self.dozing = False
            self._event.set()

    def sleep(self, seconds: float) -> None:
        """Sleep, for the housekeeper alone. What rang before it sleeps wakes it at once."""
        self._event.wait(seconds)
        self._event.clear()
