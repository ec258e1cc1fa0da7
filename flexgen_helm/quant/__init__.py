"""Group-wise quantization: formats, their arithmetic, and the packed bytes."""
