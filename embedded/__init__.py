"""The embedded model: a small Llama trained on text that the project writes itself.

The weights lie in `MODEL_DIR`, an ordinary Hugging Face folder. The other modules hold the
grammar, the training script and the evaluation; serving needs none of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

MODEL_DIR: Final[Path] = Path(__file__).resolve().parent / "model"
"""The folder of the embedded model: config, tokenizer and weights."""
