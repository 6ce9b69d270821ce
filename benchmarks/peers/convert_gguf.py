"""llama.cpp's own converter, for tokenizers that it has never seen.

    python convert_gguf.py LLAMACPP_SOURCE MODEL_FOLDER --outfile FILE --outtype bf16

The converter knows tokenizers by a fingerprint of what they make of a test text, and refuses every other one.
`make_model.py` trains a vocabulary of its own that splits text as GPT-2 does: that is what is said of a stranger here.
"""

import runpy
import sys


def main() -> None:
    source = sys.argv[1]
    sys.path.insert(0, source)
    # lazy: it lies in the folder that the command line names
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
