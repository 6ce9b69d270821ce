"""Tokenizers of the two families, small enough to build in a test."""

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Hello world, hello there!",
    "one two three four five six seven eight nine ten; naïve café, Zürich, 你好世界, 🙂🙃👩‍🚀",
    "def main(): return [1, 2, 3]\n\n    # indented\tcomment",
] * 3
ADDED = ["<think>", "</think>", "covid19", "     "]  # not special; the first one has id 400
SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def build_byte_level() -> Tokenizer:
    """Byte-level BPE like that of GPT-2, Llama 3 and Qwen, with a BOS token before texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in ADDED])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)]
    )
    return tokenizer


def build_sentencepiece() -> Tokenizer:
    """BPE with byte fallback and leading-space handling like that of Llama 2."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    letters = sorted({letter for text in CORPUS[:2] for letter in text if letter.isascii() and letter not in " \n\t"})
    vocab = {piece: index for index, piece in enumerate([*pieces, *letters])}
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he")]
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def build_word_pieces() -> Tokenizer:
    """WordPiece, whose decoder looks at neighbouring tokens: only decoding at once gives the text."""
    words = ["[UNK]", "hel", "##lo", "wor", "##ld", "the", "fo", "##x", "!", "a"]
    tokenizer = Tokenizer(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return tokenizer
