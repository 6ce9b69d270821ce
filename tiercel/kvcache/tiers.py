"""The tiers of memory and disk, and the books that connect them."""

from msgspec import Struct

from tiercel.kvcache.copy_link import CopyLinks
from tiercel.kvcache.key_news import KeyNews
from tiercel.kvcache.pool import SlotPool
from tiercel.kvcache.quota import CopyQuotas
from tiercel.kvcache.transfers import TransferBook
from tiercel.values.errors import InvariantError
from tiercel.values.ids import BlockKey, SlotId
from tiercel.values.tier import Tier


class TierLimits(Struct, frozen=True, kw_only=True):
    """The part of the tiers that each kind of work may use."""

    shadow_share: float = 0.25  # of DDR, for copies that also lie in HBM
    wanted_share: float = 0.5  # of the gateway, for what waiting sequences will need
    background_blocks: int = 16  # flying for no sequence, on each route; from HBM to DDR at least, unless it is 0
    write_back_s: float = 0.01  # of copying from HBM to DDR for no sequence: one step of decodes and more
    write_back_share: float = 0.125  # of HBM that these copies hold at most, because held slots cannot be evicted
    fetch_blocks: int = 64  # flying up from the disk
    carried_blocks: int = 2048  # by one transfer between HBM and DDR, so that booking its landing costs about 1 ms
    daily_blocks: int = 0  # written to the disk a day; 0: no limit
    always_loads: bool = False  # load whatever can be loaded, even if computing is faster
    has_reuse: bool = True  # False: a restored copy is dropped below, as systems without a block store do
    has_write_back: bool = True
    has_journal: bool = False  # the gateway is the device tier itself and its copies are to be signed


class TierSet:
    """The pools of the tiers, and the transfers, links and quotas between them.

    On the CPU one arena may be HBM and DDR in one: then `host` is None, and the device tier is the gateway. The gateway
    is the memory tier that the disk reads into and writes from.
    """

    def __init__(self, device: SlotPool, host: SlotPool | None, disk: SlotPool | None, limits: TierLimits) -> None:
        self.device = device
        self.host = host
        self.disk = disk
        self.gateway = host or device
        self.limits = limits  # benchmarks replace them between two steps
        self.transfers = TransferBook(device, host, carried_blocks=limits.carried_blocks)
        lower_pools = {Tier.DDR: host, Tier.SSD: disk}
        self.quotas = CopyQuotas({tier: pool for tier, pool in lower_pools.items() if pool is not None})
        next_pool, next_tier = host or disk, Tier.SSD if host is None else Tier.DDR
        self.links = CopyLinks(device, next_pool, self.transfers, next_tier) if next_pool is not None else None

    def loadable(self, key: BlockKey) -> SlotId | None:
        """Return the DDR slot that a block could be restored from; None if there is none, or no DDR tier."""
        return None if self.host is None else self.host.slot_by_key.get(key)

    def is_coming_to_gateway(self, key: BlockKey) -> bool:
        """Return whether a block that DDR does not hold lies in the device tier or is on its way to DDR."""
        if self.host is None:
            return False
        return key in self.device.slot_by_key or self.transfers.is_flying(Tier.DDR, key)

    def pools(self) -> tuple[tuple[Tier, SlotPool], ...]:
        """Return every tier that exists. An arena that is HBM and DDR in one counts as HBM."""
        named = ((Tier.HBM, self.device), (Tier.DDR, self.host), (Tier.SSD, self.disk))
        return tuple((tier, pool) for tier, pool in named if pool is not None)

    def tell_keys(self) -> KeyNews:
        """Return the announced keys of all tiers, kept up to date from now on. Call it once."""
        news = KeyNews()
        for _, pool in self.pools():
            pool.slot_by_key.tell(news)
        return news

    def require_host(self) -> SlotPool:
        """Return the DDR tier. Errors: InvariantError if there is none."""
        if self.host is None:
            raise InvariantError("tiers.no_host")
        return self.host

    def require_disk(self) -> SlotPool:
        """Return the SSD tier. Errors: InvariantError if there is none."""
        if self.disk is None:
            raise InvariantError("tiers.no_disk")
        return self.disk
