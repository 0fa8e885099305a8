"""From records to tables and verdicts. No torch here, and no words or pictures.

In: stored records. Out: tidy frames and tables, with intervals where there are seeds. Open `runs`
first for the rows and what is compared with what, `losses` for the loss gap.
"""
