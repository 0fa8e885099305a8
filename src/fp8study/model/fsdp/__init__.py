"""FSDP2's own ways to gather and to reduce, replaced.

`patches` lists what is replaced and for which switch; `peers` is how GPUs of one host read each
other's memory.
"""
