"""Long runs under faults: what they do to the streams of a server, and what is lost."""
