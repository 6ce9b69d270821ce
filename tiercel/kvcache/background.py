"""Work for idle copy time: write-back, signing, verification and writing to the disk. No sequence waits for it."""

from collections import deque
from collections.abc import Callable, Iterable

from tiercel.kvcache.chain_writer import ChainWriter
from tiercel.kvcache.disk_traffic import DiskTraffic
from tiercel.kvcache.table import BlockTable
from tiercel.kvcache.tiers import TierSet
from tiercel.kvcache.verification import UnverifiedCopies
from tiercel.kvcache.write_back import WriteBack
from tiercel.values.ids import BlockKey, SlotId
from tiercel.values.rates import Rates
from tiercel.values.tier import Purpose, Route, Transfer, Verdict

_MAX_ADOPTED = 2048  # disk slots in one step: about 2 ms

Scan = Callable[[int], list[tuple[SlotId, BlockKey]] | None]
"""Returns the blocks that a recovering volume has found since the last call, up to a number; None at the end."""


class BackgroundWork:
    """The copies that could be made for no sequence in particular, and the limits on making them."""

    def __init__(
        self,
        tiers: TierSet,
        disk_traffic: DiskTraffic,
        unverified: UnverifiedCopies,
        block_size: int,
        rates: Callable[[], Rates],
    ) -> None:
        self._tiers = tiers
        self._disk_traffic = disk_traffic
        self._unverified = unverified
        self._write_back = WriteBack(tiers, block_size, rates)
        self._chain_writer = ChainWriter(tiers, disk_traffic, self._write_back, block_size, rates)
        self._unsigned: deque[SlotId] = deque(maxlen=tiers.device.blocks)
        self._scan: Scan | None = None

    @property
    def is_busy(self) -> bool:
        """Whether there is work to do or a transfer in flight."""
        return bool(len(self._tiers.transfers) or len(self._unverified) or self._scan) or self.has_unsaved

    @property
    def has_unsaved(self) -> bool:
        """Whether the disk is being given a block, or could be given one that it does not have."""
        return self._chain_writer.has_work

    @property
    def num_chain_keys(self) -> int:
        """Keys of finished chains that are kept."""
        return self._chain_writer.num_keys

    # ---- news

    def note_published(self, slot: SlotId) -> None:
        """Note that a block was named whose copy is to be signed, if the gateway keeps a journal of its own."""
        if self._tiers.limits.has_journal:
            self._unsigned.append(slot)

    def note_released(self, table: BlockTable) -> None:
        """Note that a table is about to be cleared: its blocks are the next that may be evicted."""
        self._write_back.note_released(table)

    def note_ended(self, table: BlockTable) -> None:
        """Note that a sequence has ended: its chain may be worth a place on the disk."""
        self._chain_writer.offer(table)

    def note_landing(self, transfer: Transfer, verdict: Verdict) -> None:
        """Note that a transfer is over."""
        if transfer.route in (Route.SPILL, Route.PERSIST):
            self._chain_writer.note_landed()
        elif transfer.route is Route.PREFETCH and verdict is Verdict.LANDED:
            self.note_published(transfer.targets[0])

    def attach_disk(self, scan: Scan | None) -> None:
        """Adopt the blocks of a volume as fast as a scan finds them; each is verified when it is read."""
        self._scan = scan

    def close_disk(self, *, is_readable: bool = True) -> None:
        """Write nothing more to the disk; unless it is readable, no sequence waits for a read any more either."""
        self._disk_traffic.close(is_readable=is_readable)
        self._chain_writer.clear()
        self._scan = None

    # ---- once a step

    def work(self, likely_victims: Iterable[BlockTable], now_s: float, *, is_idle: bool) -> None:
        """Use idle copy time. With `is_idle` no sequence waits, so that none is likely to be preempted."""
        self._disk_traffic.note_time(now_s)
        if is_idle:
            self._write_chains(is_idle=True)
        self._write_back.copy_some(likely_victims)
        self._sign_some()
        self._unverified.verify_some()
        self._adopt_some()
        self._chain_writer.order_written()
        if not is_idle:
            self._write_chains(is_idle=False)

    def _write_chains(self, *, is_idle: bool) -> None:
        if self._scan is None:  # until the scan has ended the disk may hold blocks that are not known yet
            self._chain_writer.write_some(is_idle=is_idle)

    def _sign_some(self) -> None:
        tiers, gateway = self._tiers, self._tiers.gateway
        room = tiers.limits.background_blocks - tiers.transfers.blocks(Route.SIGN, Purpose.BACKGROUND)
        slots: list[SlotId] = []
        keys: list[BlockKey] = []
        while self._unsigned and len(slots) < room:
            slot = self._unsigned.popleft()
            key = gateway.key(slot)
            if key is not None:
                tiers.quotas.hold(gateway, slot)
                slots.append(slot)
                keys.append(key)
        if slots:
            tiers.transfers.queue(tiers.transfers.open(Route.SIGN, Purpose.BACKGROUND, tuple(keys), tuple(slots)))

    def _adopt_some(self) -> None:
        disk = self._tiers.disk
        if self._scan is None or disk is None:
            return
        found = self._scan(_MAX_ADOPTED)
        if found is None:
            self._scan = None
            return
        for slot, key in found:
            disk.adopt(slot, key)
