"""The study chosen for the machine: GPUs and a budget come in, an ordinary study goes out.

Open ``selection`` first: which runs tell most. ``estimates`` has their memory and minutes,
``timetable`` their GPUs, ``notes`` what a plan says besides, and ``study`` keeps what was chosen.
"""
