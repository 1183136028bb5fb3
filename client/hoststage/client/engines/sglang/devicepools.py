"""SGLang's device pools as the linker sees them: which there are, and where the bytes of a page lie.

SGLang describes the device pools of DSA, DeepSeek-V4 and of Mamba beside MLA or SWA itself; the plain ones (MHA, MLA, SWA, Mamba beside MHA) are
described here, in the same terms. A page of a pool is kept in hoststage as its pieces one after the other, layer by layer in the order in which the
forward pass needs them, so that one layer of a page is one contiguous run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache import linker_pool_assembler as assembler
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import _stage_local_layer_mapping, _swa_layer_mappings
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import DevicePoolEntry, DevicePoolGroup
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from hoststage.client._pages import Mover, ScatteredPages
from hoststage.client.errors import StackError

_Places = npt.NDArray[np.int64]


def pool_group(kvcache: Any, params: Any, components: set[Any], page_size: int) -> DevicePoolGroup:
    """Return the device pools of one worker.

    :raises StackError: for pools whose pages are kept in a way that is not served.
    :raises ValueError: SGLang's own, for pools that it does not hand to linkers.
    """
    names = {ComponentType.FULL, ComponentType.SWA, ComponentType.MAMBA} & set(components)
    if type(kvcache) in (MHATokenToKVPool, MLATokenToKVPool) and names == {ComponentType.FULL}:
        layers = {layer: layer for layer in range(kvcache.layer_num)}
        entries = [_attention(PoolName.KV, kvcache, layers, page_size)]
    elif type(kvcache) is SWAKVPool and names == {ComponentType.FULL, ComponentType.SWA}:
        full, window = _swa_layer_mappings(kvcache)
        entries = [
            _attention(PoolName.KV, kvcache.full_kv_pool, full, page_size),
            _attention(PoolName.SWA, kvcache.swa_kv_pool, window, page_size),
        ]
    elif type(kvcache) is HybridLinearKVPool and type(kvcache.full_kv_pool) is MHATokenToKVPool:
        full = _stage_local_layer_mapping(kvcache.full_attention_layer_id_mapping, kvcache.start_layer)
        entries = [
            _attention(PoolName.KV, kvcache.full_kv_pool, full, page_size),
            assembler._mamba_device_pool_entry(params.req_to_token_pool, kvcache.start_layer),
        ]
    else:
        return assembler.resolve_hybrid_device_pool_group(
            kvcache=kvcache, page_size=page_size, params=params, components=components
        )
    if params.mtp_draft_device_pools or len(params.sidecar_draft_device_pools) > 1:
        drafts = [*params.mtp_draft_device_pools, *params.sidecar_draft_device_pools]
        kinds = [type(pool).__name__ for pool in drafts]
        raise StackError("draft pools", kinds, "run this model without speculative decoding, or without the linker")
    for draft in params.sidecar_draft_device_pools:
        # A draft layer rides the target's layer of its number: the draft model runs only when the batch's loads have finished.
        layers = {layer: layer for layer in range(draft.layer_num)}
        entries.append(_attention(PoolName.DRAFT, draft, layers, page_size, PoolName.KV))
    last = max(layer for entry in entries for layer in entry.layer_mapping)
    return DevicePoolGroup(entries, last + 1, page_size, rank_replicated=type(kvcache) is MLATokenToKVPool)


def _attention(
    name: PoolName, pool: Any, layers: Mapping[int, int], page_size: int, source: PoolName | None = None
) -> DevicePoolEntry:
    """Return the entry of an MHA or MLA pool. `layers`: from the layer of a transfer to the pool's own."""
    if type(pool) is MLATokenToKVPool:
        return DevicePoolEntry(
            name=name,
            indices_from_pool=source or name,
            device_pool=pool,
            components=[pool.kv_buffer],
            layer_mapping=dict(layers),
            page_size=page_size,
            rows_are_pages=False,
        )
    if type(pool) is not MHATokenToKVPool or pool.kv_cache_layout != "nhd":
        found = f"{type(pool).__name__} ({getattr(pool, 'kv_cache_layout', 'no layout')})"
        raise StackError(f"device pool {name}", found, "use an MHA pool in NHD layout, without SGLANG_USE_HND_KVCACHE")
    return assembler._mha_device_pool_entry(name, pool, dict(layers), page_size, source)


@dataclass(frozen=True, slots=True)
class DevicePages:
    """The pages of one device pool.

    base, step: address of every piece in row 0, and bytes from row to row. sizes: bytes of each piece. of_layer: the pieces of each transfer layer.
    source: the pool of the tree whose slot ids address it.
    """

    name: str
    source: str
    entry: DevicePoolEntry
    base: _Places
    step: _Places
    sizes: _Places
    of_layer: Mapping[int, slice]

    @classmethod
    def of(cls, entry: DevicePoolEntry) -> DevicePages:
        """Find the pieces of a pool's pages. Raises `StackError` where one of them is not contiguous in a buffer."""
        places: list[tuple[int, int]] = []
        of_layer = {}
        for layer in sorted(entry.layer_mapping):
            mapped = entry.layer_mapping[layer]
            buffers = [mapped] if isinstance(mapped, int) else list(mapped)
            start = len(places)
            places += [(c, b) for c in range(len(entry.components)) for b in buffers]
            of_layer[layer] = slice(start, len(places))
        last = max(of_layer)
        # A buffer that no layer names comes with the last one.
        places += [
            (c, b) for c, group in enumerate(entry.components) for b in range(len(group)) if (c, b) not in places
        ]
        of_layer[last] = slice(of_layer[last].start, len(places))
        meta = np.array([entry.buffer_meta[c][b] for c, b in places], dtype=np.int64)
        for (c, b), (_, step, size) in zip(places, meta.tolist(), strict=True):
            buffer = entry.components[c][b]
            if not buffer[0].is_contiguous() or step * entry._row_span != size:
                shape = f"rows of shape {tuple(buffer.shape[1:])} and strides {buffer.stride()}"
                raise StackError(f"device pool {entry.name}", shape, "use a layout with contiguous pages in each layer")
        name, source = str(entry.name), str(entry.indices_from_pool)
        return cls(name, source, entry, meta[:, 0], meta[:, 1], meta[:, 2].copy(), of_layer)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return int(self.sizes.sum())

    def rows(self, indices: Any, mover: Mover | None) -> ScatteredPages:
        """Return the pages at these slot ids, already translated to this pool. Raises `ValueError` for ids that are no whole pages of it."""
        rows = np.array(self.entry.prepare_locations(indices), dtype=np.int64)
        return ScatteredPages(self.base + rows[:, None] * self.step, self.sizes, self.entry, mover)


def device_pages(group: DevicePoolGroup) -> dict[str, DevicePages]:
    """Return the pages of every pool of a group, by name."""
    return {str(entry.name): DevicePages.of(entry) for entry in group.entries}


def by_pool(transfers: Sequence[Any]) -> dict[str, Any]:
    """Return transfers by the name of their pool."""
    return {str(transfer.name): transfer for transfer in transfers}
