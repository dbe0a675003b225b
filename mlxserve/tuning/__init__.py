"""Fine-tuning: adapters and full weights, trained on the machine that serves them."""
