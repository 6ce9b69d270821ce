"""Text to token ids and back: tokenizer, chat template, incremental detokenization, stop strings."""
