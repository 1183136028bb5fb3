"""Where the bytes of a page lie in one of SGLang's host pools.

A page of a host pool is scattered over pieces: one for each layer and K/V in `layer_first`, one or two in `page_first` and `page_first_direct`, one for each
part of the state in Mamba pools. In every pool that maps slot ids straight to memory, the address of a piece grows by the same step from page to
page. So the pieces are found once, from views of two pages, checked on the last one, and a batch of pages costs one multiplication. Pools that
translate their slot ids (compacting shared arenas) are asked for the addresses each time.

Pieces that come from views are in the order of SGLang's flat data page, so that the bytes are the same whichever of its interfaces moves them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hoststage.client._pages import ScatteredPages
from hoststage.client.errors import StackError

Addresses = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Table:
    """Address of every piece in page 0, and how far it is to the next page."""

    base: Addresses
    step: Addresses


class HostPages:
    """The pages of one host pool. `order`: "flat" where the pieces are in the order of SGLang's flat data page, else "meta"."""

    def __init__(self, pool: Any, name: str) -> None:
        self.pool = pool
        self.name = name
        self.layout = str(getattr(pool, "layout", ""))
        self.dtype = str(getattr(pool, "dtype", "")).removeprefix("torch.")
        self.page_size = int(getattr(pool, "page_size", 1) or 1)
        self.pages = int(pool.size) // self.page_size
        self._table: _Table | None = None
        self.order = "flat"
        found = None if _translates(pool) else _pieces_of_views(pool, 0)
        if found is not None:
            self.sizes = found[1]
            self._table = self._fit(found[0])
        if self._table is None:
            self.order = "meta"
            pieces, self.sizes = self._meta(np.zeros(1, dtype=np.int64))
            self._table = None if _translates(pool) else self._fit(pieces[0])

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return int(self.sizes.sum())

    def rows(self, host_indices: Any, count: int) -> ScatteredPages:
        """Return the pages at these slot ids, `page_size` ids for each of `count` pages.

        :raises StackError: where their number is not that, or an id is no page of the pool.
        """
        ids = np.asarray(host_indices.detach().cpu().numpy() if hasattr(host_indices, "detach") else host_indices)
        if ids.size != count * self.page_size:
            raise StackError(
                f"{self.name}.host_indices", ids.size, f"pass {self.page_size} for each of {count} keys of this pool"
            )
        firsts = ids.reshape(-1)[:: self.page_size].astype(np.int64, copy=False)
        bad = (firsts % self.page_size != 0) | (firsts < 0) | (firsts >= self.pages * self.page_size)
        if bad.any() and self._table is not None:
            raise StackError(
                f"{self.name}.host_indices",
                int(firsts[bad][0]),
                f"pass ids of whole pages of {self.page_size}, from 0 to {self.pages * self.page_size - 1}",
            )
        if self._table is None:
            addresses = self._meta(ids.reshape(-1))[0]
        else:
            addresses = self._table.base + (firsts // self.page_size)[:, None] * self._table.step
        return ScatteredPages(addresses, self.sizes, self.pool)

    def span(self) -> tuple[Addresses, Addresses] | None:
        """Return, for each piece, the lowest address and the end of the highest over all pages; None where they move about."""
        if self._table is None:
            return None
        last = self._table.base + (self.pages - 1) * self._table.step
        return np.minimum(self._table.base, last), np.maximum(self._table.base, last) + self.sizes

    def _meta(self, ids: npt.NDArray[Any]) -> tuple[Addresses, Addresses]:
        """Ask the pool itself for the pieces of the pages at these ids."""
        import torch

        if ids.size == 1 and self.page_size > 1:
            ids = ids[0] + np.arange(self.page_size, dtype=np.int64)
        count = ids.size // self.page_size
        pointers, sizes = self.pool.get_page_buffer_meta(torch.from_numpy(np.ascontiguousarray(ids, dtype=np.int64)))
        pieces = len(pointers) // count
        wanted = np.array(sizes[:pieces], dtype=np.int64)
        if pieces * count != len(pointers) or list(sizes) not in ([*wanted] * count, [*wanted]):
            raise StackError(
                f"{self.name}.get_page_buffer_meta", f"{len(pointers)} pieces", "pages of one pool must be alike"
            )
        return np.array(pointers, dtype=np.int64).reshape(count, pieces), wanted

    def _pieces(self, page: int) -> Addresses:
        """Return the addresses of one page's pieces, asked of the pool."""
        if self.order == "flat":
            found = _pieces_of_views(self.pool, page * self.page_size)
            assert found is not None
            return found[0]
        pieces: Addresses = self._meta(np.array([page * self.page_size], dtype=np.int64))[0][0]
        return pieces

    def _fit(self, base: Addresses) -> _Table | None:
        """Return the table of addresses, None where they do not grow evenly."""
        step = self._pieces(1) - base if self.pages > 1 else np.zeros_like(base)
        last = self._pieces(self.pages - 1)
        even = np.array_equal(base + (self.pages - 1) * step, last)
        return _Table(base, step) if even else None


def host_pages(pool: Any, name: str) -> HostPages | None:
    """Return the pages of a pool; None for a logical anchor, which hands out slot ids and has no bytes of its own."""
    if getattr(pool, "kv_buffer", ()) is None and pool.get_page_buffer_element_size() is None:
        return None
    return HostPages(pool, name)


def _translates(pool: Any) -> bool:
    """Whether slot ids are not places in memory."""
    return getattr(pool, "shared_allocation_domain", None) is not None


def _pieces_of_views(pool: Any, index: int) -> tuple[Addresses, Addresses] | None:
    """Return addresses and sizes of the pieces of the page at a slot id; None where the pool hands out copies, not views."""
    first, again = _page_tensors(pool, index), _page_tensors(pool, index)
    if first is None or again is None:
        return None
    if any(a.data_ptr() != b.data_ptr() for a, b in zip(first, again, strict=True)):
        # Both are alive, so that two copies cannot lie at one address: these are copies.
        return None
    runs = [run for tensor in first for run in _contiguous_runs(tensor)]
    return np.array([at for at, _ in runs], dtype=np.int64), np.array([size for _, size in runs], dtype=np.int64)


def _page_tensors(pool: Any, index: int) -> list[Any] | None:
    """Return the tensors that make up a page, in the order of the flat data page."""
    parts = getattr(pool, "_iter_page_tensors", None)
    try:
        # A Mamba pool joins its parts into a copy; this is what it joins.
        return list(parts(index)) if parts is not None else [pool.get_data_page(index, flat=False)]
    except (NotImplementedError, ValueError):
        # Some pools, or layouts, have no flat form; these answer `get_page_buffer_meta`.
        return None


def _contiguous_runs(tensor: Any) -> Iterator[tuple[int, int]]:
    """Yield address and size of the contiguous parts of a strided tensor, in the order of its elements."""
    if tensor.numel() == 0:
        return
    shape, strides, item = list(tensor.shape), list(tensor.stride()), int(tensor.element_size())
    run = 1
    while shape and (shape[-1] == 1 or strides[-1] == run):
        run *= shape.pop()
        strides.pop()
    base = int(tensor.data_ptr())
    for place in np.ndindex(*shape):
        yield base + item * sum(i * s for i, s in zip(place, strides, strict=True)), run * item
