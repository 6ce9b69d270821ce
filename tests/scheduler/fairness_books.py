"""Small tenant books for tests."""

from tiercel.scheduler.account import Account
from tiercel.scheduler.fairness import TenantBook
from tiercel.scheduler.fairness_limits import FairLimits
from tiercel.values.ids import TenantId

LIMITS = FairLimits(step_ms=10, quantum_ms=40, debt_ms=20, patience_s=0.5)
A, B, C = (Account(0, TenantId(name)) for name in "abc")
LOW = Account(1, TenantId("a"))


def book_with(*ready: Account, weights: dict[str, float] | None = None) -> TenantBook:
    book = TenantBook(LIMITS, {TenantId(name): weight for name, weight in (weights or {}).items()})
    for account in ready:
        book.wait(account, 1, 1, 0.0)
    return book


def deficit(book: TenantBook, account: Account) -> float:
    state = book.state(account)
    return state.deficit_ms if state is not None else 0.0


def patience(book: TenantBook, account: Account, now_s: float) -> float:
    state = book.state(account)
    return state.elapsed_patience_s(now_s) if state is not None else 0.0


def indebted() -> TenantBook:
    """A in deep debt, B eligible and waiting since 0."""
    book = book_with(A, B)
    book.refill(0.0)
    book.run(A, 1, 0.0)
    book.charge({A: 70.0}, 0.0)
    return book
