"""The client processes: requests sent, answers stamped as they arrive, and what that costs."""
