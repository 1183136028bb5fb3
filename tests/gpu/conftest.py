"""The daemon and the process group of a module, as the tests of engines have them."""

from tests.engines.conftest import group, node

__all__ = ["group", "node"]
