"""Should a model be trained in FP8 on some GPUs: what records say, else laws. No torch here.

In: a `question`, committed records and the laws. Out: an `answer` in which each number says where
it is from. Open `advise` first.
"""
