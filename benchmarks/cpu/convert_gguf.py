"""Run llama.cpp's converter with unknown tokenizers treated as GPT-2.

    python convert_gguf.py LLAMACPP_SOURCE MODEL_FOLDER --outfile FILE --outtype bf16

The converter identifies a pre-tokenizer by a hash and refuses unknown ones; `make_models.py` trains a vocabulary with
GPT-2's splitting.
"""

import runpy
import sys


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
    runpy.run_path(f"{source}/convert_hf_to_gguf.py", run_name="__main__")


if __name__ == "__main__":
    main()
