"""What a training did: the ledger of each step, and the log in a run's folder."""
