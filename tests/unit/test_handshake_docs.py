"""`docs/handshake.md` says of every fence what the table says, with the words that an operator really gets.

`python -m tests.unit.test_handshake_docs` (with the three import roots on the path) writes the generated part anew.
"""

from __future__ import annotations

from pathlib import Path

from tests.unit.test_fences_rules import CASES, Case

from hoststage.core.fences import RULES, Applies, Rule, evaluate
from hoststage.core.findings import Finding

PAGE = Path(__file__).parents[2] / "docs" / "handshake.md"
MARK = "<!-- generated from the table of fences: tests/unit/test_handshake_docs.py -->\n"

WHEN = {
    Applies.STACK: "once for the stack; a refusal refuses every mode",
    Applies.EACH_MODE: "for each mode asked for",
    Applies.BUFFER_ONLY: "for mode `buffer_only`",
    Applies.RETRACTION: "for each mode, where holds are wished for; a refusal takes the holds away, and the session only where they are required",
}


def example(case: Case) -> Finding:
    """Return the finding on the wrong side of a boundary."""
    verdict = evaluate(case.wrong, case.wrong_node, case.wrong_protocol)
    return next(f for f in verdict.findings if f.rule == case.rule and f.severity is case.severity)


def section(rule: Rule) -> str:
    """Return the part of the page about one fence."""
    lines = [
        f'<a id="{rule.id}"></a>',
        "",
        f"### {rule.id}",
        "",
        f"Demands: {rule.demand} Judged {WHEN[rule.applies]}.",
        "",
    ]
    seen: set[tuple[str, str]] = set()
    for case in (c for c in CASES if c.rule == rule.id):
        found = example(case)
        if (found.message, found.remedy) in seen or len(seen) == 3:
            continue
        seen.add((found.message, found.remedy))
        code = f", `{found.kind.name}`" if found.severity.value == "refused" else ""
        lines += [f"- {found.severity.value}{code}: {found.message}", f"  Remedy: {found.remedy}"]
    return "\n".join(lines) + "\n"


def generated() -> str:
    """Return the part of the page that follows from the table."""
    return MARK + "\n" + "\n".join(section(rule) for rule in RULES)


def test_the_page_says_what_the_table_says():
    text = PAGE.read_text()
    assert text[text.index(MARK) :] == generated(), "run python -m tests.unit.test_handshake_docs"


def test_every_fence_has_an_anchor_and_an_example():
    text = PAGE.read_text()
    for rule in RULES:
        assert f'<a id="{rule.id}"></a>' in text
        assert "Remedy: " in section(rule), rule.id


if __name__ == "__main__":
    written = PAGE.read_text()
    PAGE.write_text(written[: written.index(MARK)] + generated())
