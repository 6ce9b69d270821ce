"""Accounts: one tenant's work in one priority band, and the state that fairness keeps of each."""

from typing import NamedTuple

from tiercel.values.ids import TenantId


class Account(NamedTuple):
    """One tenant's work in one priority band: the unit that is queued, gated and charged.

    Deficits belong to accounts, not to tenants: a band must refill even if a lower band waits with deficit left.
    """

    band: int  # a lower number is served first
    tenant: TenantId


class AccountState:
    """The state of one account. Written by the TenantBook."""

    __slots__ = (
        "account", "band", "contested_from_s", "deficit_ms", "entry_patience_s", "idle_from_s", "is_barred",
        "is_eligible", "is_overdrawn", "is_patient", "num_ready", "num_running", "num_waiting", "patience_s",
        "patient_from_s", "settled_ms", "weight",
    )  # fmt: skip

    def __init__(self, account: Account, band: "BandState", weight: float) -> None:
        self.account = account
        self.band = band
        self.weight = weight
        self.deficit_ms = 0.0  # q: service that the account may have before others go first; negative: debt
        self.num_waiting = 0
        self.num_ready = 0  # waiting sequences that are dispatchable: only capacity keeps them from a slice
        self.num_running = 0
        self.is_eligible = False  # has deficit left
        self.is_patient = False  # eligible with dispatchable work, so that its patience runs
        self.is_overdrawn = False  # its debt exceeds D
        self.is_barred = False  # one of its sequences was preempted for debt
        self.settled_ms = 0.0  # part of this debt that preemptions have settled
        self.patience_s = 0.0  # elapsed patience, without the time since patient_from_s
        self.patient_from_s = 0.0
        self.entry_patience_s = 0.0  # elapsed patience when one of its sequences was last admitted
        self.idle_from_s = 0.0  # when its last work ended
        self.contested_from_s = 0.0  # reading of the band's clock when the account became overdrawn

    @property
    def has_work(self) -> bool:
        return self.num_waiting > 0 or self.num_running > 0

    def elapsed_patience_s(self, now_s: float) -> float:
        """Return how long the account has been patient since it began to wait."""
        return self.patience_s + (now_s - self.patient_from_s if self.is_patient else 0.0)


class BandState:
    """The accounts of one band. Written by the TenantBook."""

    __slots__ = ("contested_s", "counted_to_s", "num_patient", "overdrawn", "ready", "working")

    def __init__(self) -> None:
        self.working: dict[Account, AccountState] = {}  # accounts with any work
        self.ready: dict[Account, AccountState] = {}  # accounts with dispatchable waiting work
        self.overdrawn: dict[Account, AccountState] = {}  # accounts with a debt beyond D
        self.num_patient = 0  # accounts
        self.contested_s = 0.0  # time during which any account was patient, up to counted_to_s
        self.counted_to_s = 0.0

    def clock_s(self, now_s: float) -> float:
        """Return the time during which any account was patient."""
        return self.contested_s + (max(0.0, now_s - self.counted_to_s) if self.num_patient else 0.0)

    def count(self, change: int, now_s: float) -> None:
        """Change the number of patient accounts."""
        self.contested_s = self.clock_s(now_s)
        self.counted_to_s = now_s
        self.num_patient += change
