"""Runtime: the prefill and decode workers on Hugging Face models."""
