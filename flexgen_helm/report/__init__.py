"""What a run did: throughput, padding, time, and the manifest."""
