"""The configuration file that `hoststage plan` writes for `hoststage serve`."""

from __future__ import annotations

from hoststage.core.fences.context import at_least


def render_config(*, title: str, budget_bytes: int, huge_pages: bool, store_url: str) -> str:
    """Return a TOML file with the settings that follow from a plan; everything else keeps its default.

    budget_bytes: what all arenas of the node may take together. huge_pages: whether the node has the pages that the plan
    counts. store_url: the store, `none` for none.
    """
    lines = [
        f"# hoststage serve --config FILE, for {title}",
        "",
        "[memory]",
        f"budget = {budget_bytes}  # {at_least(budget_bytes)}",
        f'huge_pages = "{"auto" if huge_pages else "off"}"',
    ]
    lines += ["", "[store]", f"url = {_quoted(store_url)}"]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
