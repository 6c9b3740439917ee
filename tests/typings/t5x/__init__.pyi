"""T5X is not typed, and `integrations/t5x` would be taken for it."""

from typing import Any

def __getattr__(name: str) -> Any: ...
