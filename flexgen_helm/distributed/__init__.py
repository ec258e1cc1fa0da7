"""One run over several machines: units of requests, workers that load the model, and Ray, which starts them."""
