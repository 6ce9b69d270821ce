"""Names for the integers and bytes that identify things."""

from typing import NewType

SeqId = NewType("SeqId", int)
"""One sequence: drawn by the HTTP process, unique for the life of the engine, never reused."""

SlotId = NewType("SlotId", int)
"""One slot of a tier: room for one block. Slot 0 is the null block of padded rows and never owned."""

BlockKey = NewType("BlockKey", bytes)
"""The content address of one full block: SHA-256 over (parent key, token ids), 32 bytes."""

TenantId = NewType("TenantId", str)
"""The name of a tenant, as the operator wrote it."""
