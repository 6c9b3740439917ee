"""What a run would do, found out without running it."""
