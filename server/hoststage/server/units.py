"""Values as people write them in settings: sizes, durations, addresses, lists of ids."""

from __future__ import annotations

UNITS = {
    "": 1,
    "b": 1,
    "k": 1000,
    "kb": 1000,
    "m": 10**6,
    "mb": 10**6,
    "g": 10**9,
    "gb": 10**9,
    "t": 10**12,
    "tb": 10**12,
}
UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_SPANS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def _split(value: str) -> tuple[float, str]:
    text = value.strip()
    digits = len(text) - len(text.lstrip("0123456789."))
    return float(text[:digits]), text[digits:].strip().lower()


def parse_size(value: object) -> object:
    """Return bytes for "8GiB", "500MB" or a number; anything else is left for the validator to refuse."""
    if not isinstance(value, str):
        return value
    try:
        number, unit = _split(value)
        return int(number * UNITS[unit])
    except (KeyError, ValueError) as error:
        raise ValueError(f'"{value}" is no size; write a number of bytes or e.g. "8GiB", "500MB"') from error


def parse_span(value: object) -> object:
    """Return seconds for "10s", "250ms", "2m" or a number."""
    if not isinstance(value, str):
        return value
    try:
        number, unit = _split(value)
        return number * _SPANS[unit]
    except (KeyError, ValueError) as error:
        raise ValueError(f'"{value}" is no duration; write seconds or e.g. "10s", "250ms", "2m"') from error


def parse_budget(value: object) -> object:
    """Return 0 for "auto", else as `parse_size`."""
    return 0 if value == "auto" else parse_size(value)


def parse_ids(value: object) -> object:
    """A list in one variable or flag is separated by commas."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def parse_chunk(value: object) -> object:
    """Return bytes of a chunk: a positive multiple of 2 MiB."""
    size = parse_size(value)
    if isinstance(size, int) and (size < 2 << 20 or size % (2 << 20)):
        raise ValueError(f"{value} is no positive multiple of 2 MiB")
    return size


def check_address(value: str) -> str:
    """Return the value if it is empty or host:port."""
    host, colon, port = value.rpartition(":")
    if value and not (host and colon and port.isdecimal() and int(port) < 1 << 16):
        raise ValueError(f'"{value}" is no address; write host:port, e.g. "127.0.0.1:9477"')
    return value
