"""From the layers of one pipeline stage to its pools."""

from __future__ import annotations

from hoststage.models.deepseek_v4 import compressed_pools
from hoststage.models.layers import Attention, Compressed, Latent, State
from hoststage.models.pools import PoolDescription, Stage, attention_pool, latent_pools, state_pool


def describe_pools(stage: Stage) -> tuple[PoolDescription, ...]:
    """Return the pools of a stage, the anchor first. A stage of layers that keep nothing has none."""
    kept = [layer for layer in stage.layers if layer is not None]
    attention = [layer for layer in kept if isinstance(layer, Attention)]
    latent = [layer for layer in kept if isinstance(layer, Latent)]
    state = [layer for layer in kept if isinstance(layer, State)]
    compressed = [layer for layer in kept if isinstance(layer, Compressed)]
    pools: list[PoolDescription] = []
    windowed = [layer for layer in attention if layer.window] if stage.window_pool else []
    full = [layer for layer in attention if layer not in windowed]
    if full:
        pools.append(attention_pool(stage, "kv", full, 0))
    if latent:
        pools.extend(latent_pools(stage, latent))
    if windowed:
        pools.append(attention_pool(stage, "swa", windowed, windowed[0].window))
    if state:
        pools.append(state_pool(stage, state))
    if compressed:
        pools.extend(compressed_pools(stage, compressed))
    return tuple(pools)
