"""Run llama.cpp's converter with unknown tokenizers treated as GPT-2.

    python convert_gguf.py LLAMACPP_SOURCE MODEL_FOLDER --outfile FILE --outtype bf16 [--quantize PROGRAM TYPE]

The converter identifies a pre-tokenizer by a hash and refuses unknown ones; `make_models.py` trains a vocabulary with
GPT-2's splitting. With --quantize, which comes last, the converted file is quantised by llama-quantize, for instance to
q4_0.
"""

import runpy
import subprocess
import sys
from pathlib import Path


def main() -> None:
    source = sys.argv[1]
    sys.path.insert(0, source)
    # lazy: it is in the folder given on the command line
    from conversion.base import TextModel

    known = TextModel.get_vocab_base_pre

    def split_of(model: TextModel, tokenizer: object) -> str:
        try:
            return known(model, tokenizer)
        except NotImplementedError:
            return "gpt-2"

    TextModel.get_vocab_base_pre = split_of
    del sys.argv[1]
    program, kind = sys.argv[-2:] if "--quantize" in sys.argv else ("", "")
    if not program:
        runpy.run_path(f"{source}/convert_hf_to_gguf.py", run_name="__main__")
        return
    del sys.argv[-3:]
    place = sys.argv.index("--outfile") + 1
    made = Path(sys.argv[place])
    whole = made.with_suffix(".whole")
    sys.argv[place] = str(whole)
    try:
        runpy.run_path(f"{source}/convert_hf_to_gguf.py", run_name="__main__")
        subprocess.run([program, str(whole), str(made), kind], check=True)
    finally:
        whole.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
