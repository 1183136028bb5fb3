"""The fences: the rules that a stack must meet, judged before a model is loaded.

`evaluate` runs every row of `RULES` for every mode that a client lists. A row is pure: it sees a `Context` and yields
findings. Adding one is a function and a line in `hoststage.core.fences.table`.
"""

from hoststage.core.fences.context import RETRACTION_SUBJECT, Applies, Context, ProtocolRanges, Rule
from hoststage.core.fences.geometry import no_common_version
from hoststage.core.fences.table import RULES
from hoststage.core.fences.verdict import evaluate

__all__ = [
    "RETRACTION_SUBJECT",
    "RULES",
    "Applies",
    "Context",
    "ProtocolRanges",
    "Rule",
    "evaluate",
    "no_common_version",
]
