"""Host pools in memfds, so that the daemon can read and write them itself: SGLang's own (`"allocator": "shm"`), or the daemon's (`"host_pools": "daemon"`)."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hoststage.client._imported import Imported, ImportedPages
from hoststage.client._pages import ScatteredPages
from hoststage.client.engines.sglang.hostpages import HostPages

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class SharedPool:
    """A host pool whose pages lie in memfds.

    fds, sizes: of the memfds. memfds: `int64[pieces]`, which one each piece of a page lies in, the same for every page. starts: `int64[pieces]`, the
    address in this process at which that memfd is mapped.
    """

    pool: Any
    fds: tuple[int, ...]
    sizes: tuple[int, ...]
    memfds: Numbers
    starts: Numbers

    def places(self, rows: ScatteredPages, imported: Imported) -> ImportedPages:
        """Return where pages of this pool lie in its imported memory."""
        return ImportedPages(imported, rows.addresses - self.starts, rows.sizes, self.memfds)


@dataclass(frozen=True, slots=True)
class Region:
    """A memfd and where it is mapped in this process, in bytes."""

    fd: int
    address: int
    size: int


def regions_of(pool: Any) -> tuple[Region, ...]:
    """Return the memfds that a host pool was allocated in; nothing where its memory is not shared."""
    allocator = getattr(pool, "allocator", None)
    ours = getattr(allocator, "regions", None)
    if ours is not None:
        return tuple(Region(*region) for region in ours)
    fds, maps = tuple(getattr(allocator, "fds", ()) or ()), tuple(getattr(allocator, "mms", ()) or ())
    if len(fds) != len(maps) or not all(isinstance(m, mmap.mmap) for m in maps):
        return ()
    return tuple(Region(fd, _address(m), len(m)) for fd, m in zip(fds, maps, strict=True))


def shared_pool(pages: HostPages) -> SharedPool | None:
    """Return a pool whose pages lie in memfds; None where they do not, or move about in them."""
    regions, span = regions_of(pages.pool), pages.span()
    if not regions or span is None:
        return None
    low, high = span
    begins = np.array([region.address for region in regions], dtype=np.int64)
    sizes = np.array([region.size for region in regions], dtype=np.int64)
    inside = (begins[:, None] <= low) & (begins[:, None] + sizes[:, None] >= high)
    if not inside.any(axis=0).all():
        return None
    memfds = np.argmax(inside, axis=0).astype(np.int64)
    return SharedPool(pages.pool, tuple(region.fd for region in regions), tuple(sizes.tolist()), memfds, begins[memfds])


def _address(mapping: mmap.mmap) -> int:
    address: int = np.frombuffer(mapping, dtype=np.uint8).__array_interface__["data"][0]
    return address
