"""The table: one row for each fence. The order is the order of findings."""

from __future__ import annotations

from hoststage.core.fences import geometry, node, retraction, staging
from hoststage.core.fences.context import Applies, Rule

RULES: tuple[Rule, ...] = (
    Rule("PROTOCOL", Applies.STACK, "A protocol version and a payload path in common.", geometry.protocol),
    Rule("POOL_GEOMETRY", Applies.STACK, "Positive and consistent sizes.", geometry.pool_geometry),
    Rule("PIN_REQUIRED", Applies.STACK, "Pinned memory, where the client requires it.", node.pin_required),
    Rule(
        "SIDECAR_MAPPING_INCOMPLETE",
        Applies.STACK,
        "Each sidecar and its source have host pools.",
        geometry.sidecar_mapping,
    ),
    Rule(
        "SIDECAR_SMALLER_THAN_SOURCE",
        Applies.STACK,
        "A sidecar has as many slots as its source.",
        geometry.sidecar_smaller,
    ),
    Rule(
        "DCP_UNSUPPORTED",
        Applies.STACK,
        "Every shard's identity is in the namespace.",
        staging.dcp_unsupported,
    ),
    Rule("STORE_REQUIRED", Applies.BUFFER_ONLY, "A store is configured.", staging.store_required),
    Rule(
        "SWA_POOL_REQUIRED",
        Applies.BUFFER_ONLY,
        "The SWA component has a host staging pool.",
        staging.swa_pool_required,
    ),
    Rule(
        "SWA_POOL_TOO_SMALL",
        Applies.BUFFER_ONLY,
        "The SWA pool holds two windows.",
        staging.swa_pool_too_small,
    ),
    Rule(
        "AUXILIARY_SWA",
        Applies.BUFFER_ONLY,
        "Further window pools have host pools of two windows.",
        staging.auxiliary_swa,
    ),
    Rule(
        "SHARED_ARENA_TOO_SMALL",
        Applies.BUFFER_ONLY,
        "A shared arena holds two smallest transfers.",
        staging.shared_arena_too_small,
    ),
    Rule("SIDECAR_UNSUPPORTED", Applies.BUFFER_ONLY, "The client maps sidecars.", staging.sidecar_unsupported),
    Rule(
        "MAMBA_STATE_UNSUPPORTED",
        Applies.BUFFER_ONLY,
        "Recurrent state has a host pool and is handed over.",
        staging.mamba_state,
    ),
    Rule(
        "WRITE_BACK_RESOLVED",
        Applies.BUFFER_ONLY,
        "The write policy is not write_back.",
        staging.write_back_resolved,
    ),
    Rule("DECODE_ROLE", Applies.BUFFER_ONLY, "Decode is served; SGLang's flags are not.", staging.decode_role),
    Rule(
        "POOL_TOO_SMALL",
        Applies.EACH_MODE,
        "Every pool holds the least that serves the mode.",
        staging.pool_too_small,
    ),
    Rule("BUDGET", Applies.EACH_MODE, "The grant fits the node's budget.", node.budget),
    Rule("RETRACTION_PATH", Applies.RETRACTION, "Memory that the client maps.", retraction.retraction_path),
    Rule("RETRACTION_MAMBA", Applies.RETRACTION, "No recurrent state to be held.", retraction.retraction_mamba),
    Rule(
        "RETRACTION_PURE_SWA",
        Applies.RETRACTION,
        "A full-attention pool, or window-only holds by opt-in.",
        retraction.retraction_pure_swa,
    ),
    Rule(
        "RETRACTION_STACK",
        Applies.RETRACTION,
        "Host pools for all that a request lives in.",
        retraction.retraction_stack,
    ),
    Rule(
        "RETRACTION_CAPACITY",
        Applies.RETRACTION,
        "Room for one largest request, or two.",
        retraction.retraction_capacity,
    ),
)
"""`POOL_TOO_SMALL` is the two-window rule's counterpart for pools without a window, and for window pools in `cache`."""
