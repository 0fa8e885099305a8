"""What three public documents claim, and what the records say of it.

In: the frames that the report is made of. Out: one finding for each claim and class of machines.
The claims stand in ``claims.yaml``, in our words, with the documents' figures; the tests that judge
them are functions, by subject. Open `ledger` first.
"""
