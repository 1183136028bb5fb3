"""What one layer of a model keeps per token or per request, before any sharding."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Attention:
    """Keys and values of `kv_heads` heads. window: tokens that the layer looks back on, 0 for all of them.

    chunked: the window is a chunk of chunked attention, whose start is fixed, not a sliding one.
    """

    kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int = 0
    chunked: bool = False


@dataclass(frozen=True, slots=True)
class Latent:
    """One compressed latent and its rotary part (MLA), the same on every tensor-parallel rank.

    index_dim: width of the sparse-attention indexer's key, 0 without one.
    """

    rank: int
    rope_dim: int
    index_dim: int = 0


@dataclass(frozen=True, slots=True)
class State:
    """A recurrent layer's state (Mamba 2 or gated delta net): a short convolution's tail and the state proper.

    The convolution covers `heads * head_dim + 2 * groups * state_size` channels and keeps `kernel - 1` steps.
    """

    heads: int
    head_dim: int
    state_size: int
    groups: int
    kernel: int
    conv_bytes: int
    state_bytes: int


@dataclass(frozen=True, slots=True)
class Compressed:
    """A DeepSeek-V4 layer: a sliding window of its own, and beyond it one entry for each `ratio` tokens (0: none)."""

    ratio: int
    head_dim: int
    rope_dim: int
    index_dim: int
    window: int


Layer = Attention | Latent | State | Compressed


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The layers of a model in order (None: one that keeps nothing), and what belongs to the whole of it.

    max_positions: tokens of the longest request, 0 unknown. page_tokens: the page that the kernels of the architecture
    ask for, 0 where any will do. window_pool: whether SGLang keeps the window layers in a pool of their own.
    """

    layers: tuple[Layer | None, ...]
    max_positions: int
    page_tokens: int = 0
    window_pool: bool = False

    @property
    def replicated(self) -> bool:
        """Whether all cached bytes are the same on every tensor-parallel rank."""
        kept = [layer for layer in self.layers if layer is not None]
        return bool(kept) and all(isinstance(layer, Latent | Compressed) for layer in kept)
