"""Shared memory between the daemon and its co-located clients: mapping, descriptor passing, copies, CUDA registration.

Only the standard library, ctypes and numpy are imported here, so that the light client stays light.
"""
