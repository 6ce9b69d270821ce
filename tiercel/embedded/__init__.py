"""The embedded model: the weights of a small Llama trained on text that the project generates.

`MODEL_DIR` is an ordinary Hugging Face folder. How the model is trained and evaluated stands in `tools/embedded/`.
"""

from pathlib import Path
from typing import Final

MODEL_DIR: Final[Path] = Path(__file__).resolve().parent / "model"
"""The folder of the embedded model: config, tokenizer and weights."""
