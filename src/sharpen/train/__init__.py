"""Training: one learner, and one short flat loop a method over it."""
