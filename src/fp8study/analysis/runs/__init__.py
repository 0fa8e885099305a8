"""Runs as rows: what each is called, and which of them are compared. No torch here.

In: stored records. Out: a tidy frame and its pairs. Open `frames` first for the rows, `pairing`
for what is compared with what, `naming` for how arms and settings are called.
"""
