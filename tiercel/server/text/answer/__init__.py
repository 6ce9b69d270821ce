"""The parts of an answer: the text is split into thoughts, content and calls of functions as it arrives."""
