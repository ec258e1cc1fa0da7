"""One run over several machines: units of requests, workers, and Ray Data, which joins them."""
