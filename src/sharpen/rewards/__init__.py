"""Rewards: what scores a trajectory in training and in evaluation, one function for both."""
