"""What a run is and what it leaves behind. No torch here, and nothing from any other room.

In: fields as a notebook, a YAML file or a command line gives them. Out: a checked `RunConfig`, the
runs of a study, and records that are written once and read for ever. Open `fields` first, then
`config` and `records`.
"""
