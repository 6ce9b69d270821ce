"""Health check of the container: exit code 0 if the server accepts new requests, else 1 and one line.

The port is TIERCEL_PORT, else VLLM_PORT, else 8000; TLS is used if TIERCEL_SSL_CERTFILE or VLLM_SSL_CERTFILE is set,
and any certificate is accepted on loopback. Flags and tiercel.toml are not read: a server that gets its port or
certificate from these, or that serves a Unix socket (`uds`), needs another health check.
"""

import http.client
import os
import ssl
import sys
import urllib.error
import urllib.request

_TIMEOUT_S = 4.0


def main() -> int:
    """Request /ready on loopback, without the proxy of the environment."""
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
    """Return the port as `tiercel serve` reads it: a Kubernetes service link, tcp://10.0.0.1:80, is not a port."""
    words = (os.environ.get(name, "") for name in ("TIERCEL_PORT", "VLLM_PORT"))
    return next((word for word in words if word and not word.startswith("tcp://")), "8000")


if __name__ == "__main__":
    sys.exit(main())
