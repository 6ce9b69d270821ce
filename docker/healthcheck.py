"""Ends with 0 when the server of this container would serve a new request now, with 1 and one line otherwise.

It asks at the port of TIERCEL_PORT, else of VLLM_PORT, else 8000, and over TLS where TIERCEL_SSL_CERTFILE or
VLLM_SSL_CERTFILE is set; whose certificate it is does not matter on loopback. It reads neither flags nor tiercel.toml:
a server that has these from there, or that serves a Unix socket (`uds`), needs another health check in its place.
"""

import http.client
import os
import ssl
import sys
import urllib.error
import urllib.request

_TIMEOUT_S = 4.0


def main() -> int:
    """Ask /ready on loopback, past any proxy that the container may have been given."""
    tls = urllib.request.HTTPSHandler(context=_any_certificate())
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}), tls)
    try:
        with direct.open(f"{_scheme()}://127.0.0.1:{_port()}/ready", timeout=_TIMEOUT_S) as reply:
            print(reply.read().decode())
        return 0
    except urllib.error.HTTPError as exc:
        print(exc.read().decode())
    except (OSError, http.client.HTTPException) as exc:
        print(repr(exc))
    return 1


def _any_certificate() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _scheme() -> str:
    return "https" if any(os.environ.get(name) for name in ("TIERCEL_SSL_CERTFILE", "VLLM_SSL_CERTFILE")) else "http"


def _port() -> str:
    """As `tiercel serve` reads it: the link of a Kubernetes service, tcp://10.0.0.1:80, is no port."""
    words = (os.environ.get(name, "") for name in ("TIERCEL_PORT", "VLLM_PORT"))
    return next((word for word in words if word and not word.startswith("tcp://")), "8000")


if __name__ == "__main__":
    sys.exit(main())
