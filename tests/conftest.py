"""Marks tests by their folder, and skips those that need a CUDA device where there is none."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("thorough", max_examples=3000, stateful_step_count=100, deadline=None)

FOLDER_MARKS = ("gpu", "engines", "bench", "chaos")
TESTS = Path(__file__).parent


def cuda_devices() -> int:
    """Return the number of CUDA devices, asked of the driver itself so that torch is not imported."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test the mark of its folder; skip tests marked ``gpu`` without a device."""
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else ""
        if folder in FOLDER_MARKS:
            item.add_marker(folder)
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not cuda_devices():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
