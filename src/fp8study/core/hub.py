"""Whether the Hugging Face hub can be asked, decided once and quickly.

Its client retries an unreachable hub for most of a minute at every question, while GPUs wait.
"""

from __future__ import annotations

import os
import socket
from functools import cache
from urllib.parse import urlsplit

#: Seconds to wait for a connection.
PATIENCE_S = 4.0


@cache
def is_reachable() -> bool:
    """Return whether the hub answers; if not, tell its client to use only what is cached.

    Call before the first import of `transformers` or `datasets`: they read the setting once.
    ``HF_ENDPOINT`` and ``HF_HUB_OFFLINE`` are respected; behind a proxy we let the client try.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        return False
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY")):
        return True
    address = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), timeout=PATIENCE_S).close()
    except OSError:
        os.environ["HF_HUB_OFFLINE"] = "1"
        return False
    return True
