"""Learning: policy-gradient mathematics, DistillCache's update, and the training loop."""
