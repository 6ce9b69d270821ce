"""Content addresses of full blocks.

A full block never changes, so it is named by what it holds: SHA-256 over its parent's key and its token ids. The
first parent is the namespace, so blocks of other weights, layouts or tenants can never be hit. A key is proof
enough: no token text is kept to compare with.
"""

import hashlib
import hmac

from tiercel.ids import BlockKey


def namespace_key(fingerprint: bytes, scope: bytes) -> BlockKey:
    """The root of all chains of one model and one sharing scope, 32 bytes.

    `fingerprint` names weights, config, dtype and layout; `scope` is secret to a tenant or to a group of tenants.
    """
    return BlockKey(hmac.digest(scope or b"\0", fingerprint, "sha256"))


def child_key(parent: BlockKey, tokens: bytes) -> BlockKey:
    """The key of the block that holds `tokens` (raw uint32) behind the chain that ends in `parent`."""
    return BlockKey(hashlib.sha256(parent + tokens).digest())
