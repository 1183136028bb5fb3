"""SGLang's host pools in the daemon's memory (`"hoststage": {"host_pools": "daemon"}`), whatever the storage backend.

Four functions of SGLang are hooked in the processes that make host pools: which allocator a pool takes, how much memory a pool may claim (SGLang looks at what is
free on the host, from which the daemon's memory is gone already), and the registration with CUDA and its end (in pieces, and before the memory is
unmapped). Where the setting is absent they do what SGLang does.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import os
import threading
from collections.abc import Callable
from typing import Any, cast

import torch
from sglang.srt import runtime_context
from sglang.srt.environ import envs
from sglang.srt.mem_cache.pool_host import base, common
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.utils import is_musa, is_npu, is_xpu

from hoststage.client.engines.sglang.hostpools import FIELD, HostPoolsUnavailable, Lease, Leases
from hoststage.client.engines.sglang.plugin import read_extra
from hoststage.client.engines.sglang.settings import HostPools, Settings
from hoststage.client.errors import HostStageError
from hoststage.shm.cuda import MAX_PIECE_BYTES, pieces

_log = logging.getLogger(__name__)

_RANGES = common._CUDA_HOST_REGISTERED_RANGES_ATTR
_LESS = "lower --hicache-ratio or --hicache-size, or raise the daemon's --budget"
_FLAG = "--hicache-storage-backend-extra-config"


def hook() -> None:
    """Hook the four functions, once a process."""
    # The registry also replaces them in the modules that have imported them by name.
    for name, around in (
        ("common.get_allocator_from_storage", around_choice),
        ("base.host_memory_budget_bytes", around_budget),
        ("common._cuda_host_register", around_register),
        ("common._cuda_host_unregister", around_unregister),
    ):
        target = f"sglang.srt.mem_cache.pool_host.{name}"
        if not any(known is around for _, known, _ in HookRegistry._hooks.get(target, ())):
            HookRegistry.register(target, around, HookType.AROUND)


# -------------------------------------------------------------- the leases of this process

_current: Leases | None = None
_choosing = threading.Lock()


def leases() -> Leases | None:
    """Return the leases of this process, None where the engine's configuration does not ask for the daemon's memory."""
    try:
        given = read_extra(runtime_context.get_memory())
    except ValueError:
        # Outside an engine.
        return None
    if given is None:
        return None
    return leases_for(Settings.of(given))


def leases_for(settings: Settings) -> Leases | None:
    """Return the leases of this process under these settings."""
    global _current
    if settings.host_pools is not HostPools.DAEMON or not _supported():
        return None
    with _choosing:
        if _current is None or _current.settings != settings:
            if _current is not None:
                _current.close()
            _current = Leases(settings, _worker())
        return _current


@functools.cache
def _supported() -> bool:
    if is_npu() or is_xpu() or is_musa():
        _log.warning("hoststage: %s applies to CUDA, ROCm and CPU; SGLang allocates its host pools itself here", FIELD)
        return False
    return True


def _worker() -> str:
    try:
        parallel = runtime_context.get_parallel()
        return f"host pools tp{parallel.tp_rank} pp{parallel.pp_rank} pid {os.getpid()}"
    except (AttributeError, RuntimeError, ValueError):
        return ""


# -------------------------------------------------------------- the allocator


class DaemonHostTensorAllocator(common.HostTensorAllocator):  # type: ignore[misc]
    """Allocates tensors in the daemon's memory, one lease each, and in SGLang's own way where the daemon has none to give.

    Dropping the last view of a tensor gives its memory back.
    """

    def __init__(self, supply: Leases, otherwise: Any) -> None:
        super().__init__()
        self._supply = supply
        self._otherwise = otherwise
        self._addresses: list[int] = []

    @property
    def regions(self) -> tuple[tuple[int, int, int], ...]:
        """Memfds that tensors of this allocator live in, each with the address at which it is mapped and its bytes, for the path `imported`."""
        found = (self._supply.find(address) for address in self._addresses)
        return tuple(lease.region for lease in found if lease is not None and lease.region is not None)

    def allocate(self, dims: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
        """Return a tensor that is not initialised.

        :raises HostPoolsUnavailable: where the daemon has no memory to give and is `required` to.
        :raises ValueError: where SGLang's own check of free memory does not allow it either.
        """
        assert device == "cpu", f"host pools are in CPU memory; got device={device!r}"
        self.dtype, self.dims = dtype, dims
        size = math.prod(dims) * dtype.itemsize
        if not size:
            return torch.empty(dims, dtype=dtype)
        try:
            array = self._supply.lease(size)
        except HostStageError as error:
            return self._without(error, size)
        self._addresses.append(array.ctypes.data)
        return torch.from_numpy(array).view(dtype).reshape(dims)

    def _without(self, error: HostStageError, size: int) -> torch.Tensor:
        if self._supply.settings.required:
            raise _unavailable(size, error) from error
        # The check before was of the daemon's memory, and somebody else was faster.
        own = _own_budget()
        if size > own:
            raise ValueError(
                f"Not enough host memory available. Requesting {size / 1e9:.2f} GB but only have {own / 1e9:.2f} GB free, "
                f"and the daemon does not supply it ({error}); {_LESS}"
            ) from error
        _say(self._supply, error, f"{size / 1e9:.3f} GB of a host pool")
        tensor: torch.Tensor = self._otherwise.allocate(self.dims, dtype=self.dtype, device="cpu")
        return tensor


def around_choice(original: Callable[[Any], Any], allocator_type: Any) -> Any:
    """Choose the daemon's memory for a pool where that is configured, and the storage backend does not bring its own."""
    own = original(allocator_type)
    supply = leases()
    if supply is None:
        return own
    if type(own) is not common.HostTensorAllocator:
        _log.warning("hoststage: %s is left aside, %s brings memory of its own", FIELD, type(own).__name__)
        return own
    return DaemonHostTensorAllocator(supply, own)


_said: set[str] = set()


def _say(supply: Leases, error: HostStageError, what: str) -> None:
    """Say why memory is SGLang's own: once for each reason."""
    why = str(error)
    if why not in _said:
        _said.add(why)
        _log.warning("hoststage: %s is allocated by SGLang itself, the daemon at %s: %s", what, supply.address, why)


def _unavailable(size: int, error: HostStageError) -> HostPoolsUnavailable:
    return HostPoolsUnavailable(
        FIELD, HostPools.DAEMON.value, f"{size} bytes of a host pool could not be leased: {error}", _LESS
    )


# -------------------------------------------------------------- the check of free memory


def around_budget(original: Callable[..., int], requested_bytes: int = 0, *, auto_size: bool = False) -> int:
    """Return what the daemon could give, where it can give what is wanted; else what SGLang makes of the host's memory.

    :raises HostPoolsUnavailable: where the daemon cannot give it and is `required` to.
    """
    supply = leases()
    # Within a scope the snapshot was taken by an earlier call of this.
    if supply is None or base._host_memory_budget.get() is not None:
        return original(requested_bytes, auto_size=auto_size)
    try:
        free = supply.free()
    except HostStageError as error:
        if supply.settings.required:
            raise _unavailable(requested_bytes, error) from error
        _say(supply, error, "the memory of all host pools")
        return original(requested_bytes, auto_size=auto_size)
    if auto_size:
        # Asked by all ranks before any of them leases.
        free //= base.ranks_per_host()
    if free and requested_bytes <= free:
        return free
    if supply.settings.required:
        raise HostPoolsUnavailable(
            FIELD,
            HostPools.DAEMON.value,
            f"a host pool of {requested_bytes} bytes is wanted and {free} are free",
            _LESS,
        )
    return original(requested_bytes, auto_size=auto_size)


def _own_budget() -> int:
    """Return what SGLang itself would let a pool have, outside of any scope."""
    token = base._host_memory_budget.set(None)
    try:
        return int(inspect.unwrap(base.host_memory_budget_bytes)())
    finally:
        base._host_memory_budget.reset(token)


# -------------------------------------------------------------- registration with CUDA


def around_register(
    original: Callable[..., None], buffer: torch.Tensor, registration_granularity_bytes: int | None = None
) -> None:
    """Register a tensor with CUDA; one in the daemon's memory in pieces, which some drivers need beyond 64 GiB."""
    lease = _lease_of(buffer)
    if lease is None:
        original(buffer, registration_granularity_bytes)
        return
    size = buffer.numel() * buffer.element_size()
    most = min(MAX_PIECE_BYTES, max(envs.SGLANG_HICACHE_HOST_REGISTER_CHUNK_GB.get(), 1) << 30)
    stride = registration_granularity_bytes or _unit(tuple(buffer.shape), buffer.element_size(), most)
    done: list[tuple[int, int]] = []
    cudart = cast(Any, torch.cuda).cudart()
    for offset, part in pieces(size, stride, most):
        code = int(cudart.cudaHostRegister(lease.address + offset, part, 0))
        if code:
            common._cuda_host_unregister_ranges(cudart, done, operation="registration rollback")
            raise RuntimeError(
                f"cudaHostRegister failed (rc={code}, {cudart.cudaGetErrorString(code)}) for {part} bytes at {offset} of {size} bytes "
                f"of the daemon's memory; with {FIELD} left out, SGLang allocates its host pools itself"
            )
        done.append((lease.address + offset, part))
    # For SGLang's own unregistration, when the pool is destroyed in good order.
    setattr(buffer, _RANGES, done)
    lease.unpin = functools.partial(_unpin, done)


def around_unregister(original: Callable[[torch.Tensor], None], buffer: torch.Tensor) -> None:
    """Unregister a tensor; the end of its lease has nothing left to do then."""
    lease = _lease_of(buffer)
    if lease is not None:
        lease.unpin = None
    original(buffer)


def _unit(shape: tuple[int, ...], item: int, most: int) -> int:
    """Return bytes at whose multiples a tensor may be cut: its largest parts along leading dimensions that fit `most`, so that no copy of a page's
    piece spans two registrations. A tensor of one dimension is not cut."""
    for place in range(len(shape)):
        part = math.prod(shape[place:]) * item
        if part <= most:
            return part
    return math.prod(shape) * item


def _unpin(ranges: list[tuple[int, int]]) -> None:
    common._cuda_host_unregister_ranges(cast(Any, torch.cuda).cudart(), ranges, operation="end of a lease")


def _lease_of(buffer: torch.Tensor) -> Lease | None:
    return None if _current is None else _current.find(buffer.data_ptr())
