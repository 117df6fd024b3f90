"""Training batches and held-out sets, read from files; nothing is downloaded."""
