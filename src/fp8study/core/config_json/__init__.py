"""A model's own ``config.json``: its text comes in, what no model can be built from is refused.

Open ``checking`` first: which fields are looked at before transformers reads them. ``reading`` says
where a file is no JSON.
"""
