"""Ends with 0 when the server of this container would serve a new request now, with 1 and one line otherwise."""

import os
import sys
import urllib.error
import urllib.request

_TIMEOUT_S = 4.0


def main() -> int:
    """Ask /ready on loopback, past any proxy that the container may have been given."""
    port = os.environ.get("TIERCEL_PORT") or "8000"
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"http://127.0.0.1:{port}/ready", timeout=_TIMEOUT_S) as reply:
            print(reply.read().decode())
        return 0
    except urllib.error.HTTPError as exc:
        print(exc.read().decode())
    except OSError as exc:
        print(exc)
    return 1


if __name__ == "__main__":
    sys.exit(main())
