"""What a run leaves in its folder: checkpoints, events, metrics, settings, and their proof.

    import nm_sparsity_jax as nms
    nms.runs.verify("runs/sparse").ok                   # is the newest checkpoint n:m?
    nms.runs.finalize("runs/sparse", "runs/final")      # exact zeros, written and proven
    nms.runs.rules_of("runs/sparse")                    # what it trains by
    nms.runs.export("runs/final", "model.safetensors")  # in timm's names, and proven there
    nms.runs.export("runs/final", "model")              # a T5: as Hugging Face's
    nms.runs.pack("runs/final", "p.safetensors")        # without the zeros
    nms.runs.convert("t5-small", "start")               # and back, for T5X

The names are imported when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
  "verify": "verify_checkpoint", "finalize": "verify_checkpoint", "rules_of": "trained",
  "convert": "export_checkpoint", "export": "export_checkpoint", "pack": "export_checkpoint",
}  # fmt: skip

if TYPE_CHECKING:
  from nm_sparsity_jax.runs.export_checkpoint import convert, export, pack
  from nm_sparsity_jax.runs.trained import rules_of
  from nm_sparsity_jax.runs.verify_checkpoint import finalize, verify

__all__ = ["convert", "export", "finalize", "pack", "rules_of", "verify"]


def __getattr__(name: str) -> Any:
  if name in _HOME:
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
