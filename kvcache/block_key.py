"""Content addresses of full blocks.

A full block never changes, so its key is the SHA-256 of its parent's key and its token ids. The first parent is the
namespace, so that blocks of other weights, layouts or tenants can never be hit. No token ids are kept to compare with.
"""

import hashlib
import hmac

from tiercel.ids import BlockKey


def namespace_key(fingerprint: bytes, scope: bytes) -> BlockKey:
    """Return the root of all chains of one model and one sharing scope, 32 bytes.

    `fingerprint` names weights, config, dtype and layout; `scope` is a secret of a tenant or of a group of tenants.
    """
    return BlockKey(hmac.digest(scope or b"\0", fingerprint, "sha256"))


def child_key(parent: BlockKey, tokens: bytes) -> BlockKey:
    """Return the key of the block with `tokens` (raw uint32) behind the chain that ends in `parent`."""
    return BlockKey(hashlib.sha256(parent + tokens).digest())
