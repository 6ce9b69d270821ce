"""Types of the integers and bytes that identify things."""

from typing import NewType

SeqId = NewType("SeqId", int)
"""One sequence: drawn by the HTTP process, unique for the life of the engine, never reused."""

SlotId = NewType("SlotId", int)
"""One slot of a tier: space for one block. Slot 0 of HBM is the null block, which padded rows write to."""

BlockKey = NewType("BlockKey", bytes)
"""The content address of one full block: SHA-256 of the parent block's key and the block's token ids, 32 bytes."""

TenantId = NewType("TenantId", str)
"""The name of a tenant, as the operator wrote it."""

KeyHead = NewType("KeyHead", int)
"""The first 8 bytes of a block key, as a little-endian integer. Two keys share one with a probability of 2 ** -64."""

EngineId = NewType("EngineId", int)
"""One engine process of a fleet: drawn by the front, never reused, so that a restarted engine is another one."""
