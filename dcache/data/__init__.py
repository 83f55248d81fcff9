"""Text, hidden facts, prompts and the training benchmarks."""
