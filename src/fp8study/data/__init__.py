"""From a corpus to blocks of tokens, once per corpus and tokenizer. No torch here.

In: the name of a corpus and of a tokenizer. Out: one flat array of tokens on disk, and which blocks
of it each rank sees in each step. Open `tokens` first.
"""
