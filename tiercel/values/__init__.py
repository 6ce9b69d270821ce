"""Values that all rooms share: ids, requests, plans, outcomes, units, errors. They hold no state and do no I/O."""
