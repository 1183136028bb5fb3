"""How much room the store takes, may take, and ought to give back: plain arithmetic, on the event loop."""

from __future__ import annotations

from dataclasses import dataclass, field

from hoststage.server.store.options import StoreOptions


@dataclass(slots=True)
class Space:
    """Bytes of slots in use against the ceiling.

    The ceiling is the configured limit, or less where the medium has less to give: what the store uses now
    and what is free, without the floor that is left to others. So a disk that fills makes the store smaller.
    """

    options: StoreOptions
    used: int = 0
    """Slots that hold a page, are being written, are set aside, or wait to be punched."""
    pending: int = 0
    """The part of ``used`` that waits to be punched."""
    free: int = 0
    """Free room of the medium at the last look."""
    ceiling: int = field(default=0)

    def __post_init__(self) -> None:
        self.ceiling = self.options.limit_bytes

    def look(self, free: int) -> None:
        """Take note of the medium's free room."""
        self.free = free
        self.ceiling = max(0, min(self.options.limit_bytes, self.used + free - self.options.min_free_bytes))

    def lacks(self, size: int) -> int:
        """Return how many bytes are in the way of ``size`` more, once all that waits has been punched."""
        return max(0, self.used - self.pending + size - self.ceiling)

    def has_room(self, size: int) -> bool:
        """Whether ``size`` more bytes may be taken now."""
        return self.used + size <= self.ceiling

    @property
    def may_keep(self) -> int:
        """How many bytes of evicted slots may keep their blocks for the pages that come next.

        A sixteenth of the limit, which is more than lies between the watermarks by default; nothing where the medium is not
        ample, so that kept blocks never make the store smaller.
        """
        limit = self.options.limit_bytes
        ample = self.used + self.free - self.options.min_free_bytes >= limit + limit // 8
        return limit // 16 if ample else 0

    @property
    def above_high(self) -> bool:
        """Whether eviction ought to begin."""
        return self.used - self.pending > self.options.high_watermark * self.ceiling

    @property
    def above_low(self) -> int:
        """How many bytes eviction still has to free before it may end."""
        return max(0, self.used - self.pending - int(self.options.low_watermark * self.ceiling))
