"""The long text of the demo: the chapters of the Python language reference that ship with the interpreter.

``pydoc_data.topics`` holds them as plain text under the PSF licence, so nothing is downloaded and nothing is
copied into this package. Two workers of one demo run on one interpreter and so read the same text.
"""

from __future__ import annotations

from hoststage.cli.demo.models import DemoModel, LoadedModel

LICENCE = "PSF-2.0"

# In an order that reads as one text: objects, names, attributes, calls, and the statements that use them.
TOPICS = (
    "objects",
    "execmodel",
    "naming",
    "attribute-access",
    "calls",
    "function",
    "import",
    "try",
    "assignment",
)

DEFAULT_TOKENS = 2_200

_QUESTION = "\n\nIn one paragraph, what does the text above say about objects?"
_OPEN, _CLOSE = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"


class CorpusError(RuntimeError):
    """The text is missing from this Python, or too short for the number of tokens asked for."""


def text() -> str:
    """The whole text; ``CorpusError`` where the standard library was stripped of it."""
    try:
        from pydoc_data.topics import topics
    except ModuleNotFoundError as missing:
        raise CorpusError(
            "this Python has no pydoc_data.topics, the demo's text; install the complete standard library "
            "(Debian: libpython3-stdlib)"
        ) from missing
    return "\n\n".join(topics[name].strip() for name in TOPICS if name in topics)


def prompt_tokens(model: LoadedModel, n_tokens: int = DEFAULT_TOKENS) -> list[int]:
    """Exactly ``n_tokens`` token ids: the text, cut to fit, and for the instructed model a question about it.

    Raises ``CorpusError`` when the text, or ``n_tokens``, is too short.
    """
    if model.name is DemoModel.GEMMA:
        # A base model: it continues the text.
        head, tail = [int(model.module.config.bos_token_id)], []
    else:
        head, tail = _encode(model, _OPEN), _encode(model, _QUESTION + _CLOSE)
    body = _encode(model, text())
    room = n_tokens - len(head) - len(tail)
    if not 0 < room <= len(body):
        raise CorpusError(f"n_tokens is {n_tokens}; choose {n_tokens - room + 1} to {n_tokens - room + len(body)}")
    return [*head, *body[:room], *tail]


def _encode(model: LoadedModel, part: str) -> list[int]:
    ids: list[int] = model.tokenizer.encode(part, add_special_tokens=False).ids
    return ids
